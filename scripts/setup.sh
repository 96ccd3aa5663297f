#!/usr/bin/env bash
# Makes .venv in the repository root from constraints.txt, then compiles the DeepSpeed operators this machine needs.
# Called by scripts/run (core) and scripts/test (test). Writes to stderr only: stdout belongs to the product.
# usage: bash scripts/setup.sh [core|test]         PYTHON=/usr/bin/python3.12 chooses the interpreter
set -euo pipefail
exec 1>&2

level="${1:-core}"
case "$level" in
core) extras="" operators="" ;;
test) extras="[dev,lora,data]" operators="--all" ;; # every operator that a test needs
*) echo "setup: unknown level '$level' (core or test)"; exit 2 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
stamp="$venv/zerolaunch.stamp" # four lines: fingerprint, level, python, root; "installing" while setup is under way
log="$venv/setup.log"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

find_python() {
    local candidate
    local -a candidates=(python3 python3.11 python3.12 python3.13)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: no Python 3.11 or newer (tried: ${candidates[*]}). Install one (Debian: apt-get install python3" \
        "python3-venv python3-dev) or name it: PYTHON=/path/to/python3.11" >&2
    return 1
}

fingerprint() { # of everything that decides what is installed
    cat "$root/constraints.txt" "$root/pyproject.toml" "$root/scripts/setup.sh" | sha256sum | cut -d ' ' -f 1
}

# Compares the stamp with the present: "ready", "stale" (install again in place) or "broken" (start over).
state() {
    local -a was=()
    local python
    [ -e "$venv" ] || { echo broken; return; }
    python="$("$venv/bin/python" -V 2>/dev/null)" || { echo broken; return; }
    [ ! -f "$stamp" ] || mapfile -t was <"$stamp"
    if [ "${was[0]:-}" = installing ]; then
        echo broken # killed half-way: pip cannot tell a half-copied package from a whole one
    elif [ "${#was[@]}" -eq 4 ] && { [ "${was[2]}" != "$python" ] || [ "${was[3]}" != "$root" ]; }; then
        echo broken # another interpreter, or the checkout has moved: scripts in .venv/bin point to the old place
    elif [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -V 2>/dev/null)" != "$python" ]; then
        echo broken
    elif [ "${was[0]:-}" = "$(fingerprint)" ] && { [ "${was[1]}" = "$level" ] || [ "${was[1]}" = test ]; }; then
        echo ready
    else
        echo stale
    fi
}

step() { # step "what" command...: one line before, one after; the command's output goes to the log
    local what="$1" start=$SECONDS
    shift
    echo "setup: $what ..."
    if ! "$@" >>"$log" 2>&1; then
        tail -n 25 "$log"
        echo "setup: $what failed; the whole output is in $log"
        exit 1
    fi
    echo "setup: $what: $((SECONDS - start)) s"
}

install() {
    local python pip
    if [ "$(state)" = broken ]; then
        python="$(find_python)"
        rm -rf "$venv"
        mkdir "$venv"
        echo installing >"$stamp"
        step "creating .venv with $("$python" -V)" "$python" -m venv "$venv"
    elif [ -f "$stamp" ] && [ "$(sed -n 2p "$stamp")" = test ]; then
        level=test extras="[dev,lora,data]" # an update keeps what was there
    fi
    echo installing >"$stamp"
    : >"$log"
    pip=("$venv/bin/python" -m pip install --constraint "$root/constraints.txt")
    # torch first: DeepSpeed's source build imports it, and so do its other build requirements before it.
    step "installing torch, the largest download (1/2)" \
        "${pip[@]}" torch setuptools wheel ninja numpy packaging psutil py-cpuinfo pydantic
    step "installing DeepSpeed and the rest (2/2)" \
        "${pip[@]}" --no-build-isolation --editable "$root$extras"
    printf '%s\n' "$(fingerprint)" "$level" "$("$venv/bin/python" -V)" "$root" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

if [ "$(state)" != ready ]; then
    exec 9>"$root/.venv.lock"
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        echo "setup: waiting for another setup of this checkout ..."
        flock 9
    fi
    [ "$(state)" = ready ] || install
    exec 9>&-
fi

# Not fatal: planning needs no operator, and many configurations train without some of them.
"$venv/bin/python" "$root/scripts/build_ops.py" $operators ||
    echo "setup: a configuration that needs an operator named above will stop when training starts"
