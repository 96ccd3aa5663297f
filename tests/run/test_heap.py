"""Claims about what a rank on a CPU does with memory that was freed.

Run by pytest; memory is read off a process that does nothing else.
Must never depend on how much memory the machine has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from launcher.plan import GLIBC, build_plan
from tests.plan.asking import ROOT, composed, planned

BLOCK_BYTES, BLOCKS = 8 * 2**20, 32
SMALL_BYTES = 100_000  # too large for what is free in the heap already: they lie between the blocks
EVERY = BLOCK_BYTES * BLOCKS
# glibc learns from a larger block that is freed; then there are blocks and small objects in turn, and no blocks.
SCRIPT = f"""
import json, sys
from recipes.worker import set_thresholds

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

set_thresholds(json.loads(sys.argv[1]))
first = b"x" * {2 * BLOCK_BYTES}
del first
before, kept = anonymous(), []
for _ in range({BLOCKS}):
    kept.append((b"x" * {BLOCK_BYTES}, b"x" * {SMALL_BYTES}))
full = anonymous()
kept = [small for _, small in kept]
print(json.dumps([full - before, anonymous() - before]))
"""


def held(variables: dict[str, str]) -> tuple[int, int]:
    """Anonymous bytes of a process beyond those before: with all blocks, and after they were freed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    argv = [sys.executable, "-c", SCRIPT, json.dumps(variables)]
    done = subprocess.run(argv, cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    full, after = json.loads(done.stdout)
    return full, after


def test_a_rank_on_a_cpu_gives_back_what_is_freed() -> None:
    full, after = held({name: planned().env[name] for name in GLIBC})
    assert full > EVERY * 0.9 and after < EVERY * 0.1


def test_glibc_alone_would_keep_it() -> None:
    """If this fails, glibc has learnt it, and the plan's variables can go."""
    full, after = held({})
    assert full > EVERY * 0.9 and after > EVERY * 0.5


@pytest.mark.parametrize("value", ["", "1e6", "-3"])
def test_what_is_no_number_of_bytes_is_left_to_glibc(value: str) -> None:
    assert held(dict.fromkeys(GLIBC, value))[1] > EVERY * 0.5


def test_variables_of_ones_own_win() -> None:
    own = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    assert build_plan(composed(), own).env == planned().env | own
