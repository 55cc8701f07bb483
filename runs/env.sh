# Sourced by the other scripts: enters the project, makes and enters .venv, and defines how a study runs its cells. REQUIREMENTS
# names the file to install.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
requirements=${REQUIREMENTS:-requirements.txt}
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 must be 3.11 or newer." >&2; exit 2; }
[ -x .venv/bin/python ] || python3 -m venv .venv
. .venv/bin/activate
stamp=.venv/installed-$requirements
if ! cat requirements*.txt | cmp -s - "$stamp"; then
    echo "installing $requirements into .venv ..."
    python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    cat requirements*.txt > "$stamp"
fi
# glibc returns freed blocks to the kernel after every step and faults them in again; keeping them saves CPU time.
export MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TOP_PAD_=67108864

run_cell() { # RESULT MEASURED CONFIG FLAGS...: trains, measures, and keeps results/NAME.json of the run out/NAME, unless it exists
    local result=$1 measured=$2 run=out/${1#results/}
    run=${run%.json}
    shift 2
    [ -f "$result" ] && return
    mkdir -p "${run%/*}" "${result%/*}"
    echo "$(date +%H:%M:%S) ${run#out/}"
    python train.py "$@" --out_dir="$run" > "$run.txt" 2>&1 &&
        python eval.py --threads=1 --ckpt="$run" ${EVAL_FLAGS:-} >> "$run.txt" 2>&1 &&
        cp "$run/eval-$measured.json" "$result" || { echo "failed: see $run.txt"; return 1; }
}
run_cells() { xargs -P "${JOBS:-2}" -L 1 bash -c 'run_cell "$@"' _; } # of lines of its arguments, JOBS (default 2) at a time
export -f run_cell
