# Sourced by the other scripts: enters the project, and makes and enters .venv. REQUIREMENTS names the file to install.
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
