"""Front door: `python launch.py [group=choice ...] [key=value ...]`; see --help."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from launcher.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
