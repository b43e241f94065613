"""Find tritonserver, give it what a bare machine lacks, and write its command line."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_dspark.errors import UsageError

PRELOAD_LIBRARY = "_preload.so"
"""Puts the control key into tritonserver's arguments (plugins/preload); installed beside the native core."""
RESTRICTED_APIS = "model-repository,shared-memory,trace,logging"


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """A server binary and how to start it.

    Attributes:
        binary: path of tritonserver.
        backend_directory: where its backends are, or None for the server's default.
        library_path: directories its processes need in LD_LIBRARY_PATH.
    """

    binary: Path
    backend_directory: Path | None
    library_path: tuple[str, ...]


def find_tritonserver(work_directory: Path) -> TritonInstallation:
    """Return the tritonserver on PATH, else the one inside the nvidia-pytriton package.

    Args:
        work_directory: where a backend directory for the packaged server is assembled (the package itself keeps
            one stub for each Python version and none in place).

    Raises:
        UsageError: there is none, or this machine lacks a library it needs; the message says what to install.
    """
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonInstallation(Path(on_path), None, _python_library_path())
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise UsageError(
            "tritonserver is neither on PATH nor in this Python environment; install it with "
            "pip install '.[triton]' in a checkout"
        )
    package = Path(spec.origin).parent / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = package / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise UsageError(f"the nvidia-pytriton package has no stub for Python {version}; use Python 3.11 or 3.12")
    backends = work_directory / "backends"
    python_backend = backends / "python"
    python_backend.mkdir(parents=True, exist_ok=True)
    sources = (*(package / "backends" / "python").glob("*.so"), *(package / "backends" / "python").glob("*.py"), stub)
    for source in sources:
        link = python_backend / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    installation = TritonInstallation(package / "bin" / "tritonserver", backends, _python_library_path())
    for program in (installation.binary, stub):
        _check_libraries(program, installation)
    return installation


def _python_library_path() -> tuple[str, ...]:
    """Return directories that hold libpython: the stub links it, and pyenv or uv keep it outside the linker's paths."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    candidates = [
        sysconfig.get_config_var("LIBDIR"),
        os.path.join(sys.prefix, "lib"),
        os.path.join(sys.base_prefix, "lib"),
    ]
    return tuple(dict.fromkeys(d for d in candidates if d and os.path.exists(os.path.join(d, name))))


def _check_libraries(program: Path, installation: TritonInstallation) -> None:
    if shutil.which("ldd") is None:
        return
    listing = subprocess.run(
        ["ldd", str(program)], env=server_environment(installation), capture_output=True, text=True, check=False
    ).stdout
    missing = [line.split()[0] for line in listing.splitlines() if "not found" in line]
    if not missing:
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if any(name.startswith("libpython") for name in missing):
        raise UsageError(
            f"Triton's Python stub needs {missing[0]}, which this machine lacks; install it "
            f"(Debian and Ubuntu: apt-get install libpython{version}) or put it into {sys.prefix}/lib"
        )
    raise UsageError(f"{program.name} needs {', '.join(missing)}, which this machine lacks; install the package of it")


def find_preload_library() -> Path:
    """Return the library that keeps the control key off tritonserver's command line.

    Raises:
        UsageError: the installation lacks it.
    """
    core = importlib.util.find_spec("trtllm_dspark._core")
    library = (
        Path(PRELOAD_LIBRARY) if core is None or core.origin is None else Path(core.origin).with_name(PRELOAD_LIBRARY)
    )
    if not library.is_file():
        raise UsageError(f"this installation of trtllm-dspark lacks {PRELOAD_LIBRARY}; install the package again")
    return library


def server_environment(installation: TritonInstallation, *, preload: Path | None = None) -> dict[str, str]:
    """Return the environment of tritonserver: this interpreter first on PATH, since its stub takes packages from there.

    Args:
        installation: the binary.
        preload: from `find_preload_library`, for the server itself.

    Raises:
        UsageError: `python3` beside this interpreter is another one.
    """
    directory = os.path.dirname(os.path.abspath(sys.executable))
    neighbour = shutil.which("python3", path=directory)
    if neighbour is None or os.path.realpath(neighbour) != os.path.realpath(sys.executable):
        raise UsageError(
            f"{directory} has no python3 that is {os.path.basename(sys.executable)}, and Triton's stub looks for one "
            "there; run trtllm-dspark from a virtual environment"
        )
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([directory, environment.get("PATH", "")])
    libraries = [*installation.library_path, environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in libraries if part)
    # The stub embeds the interpreter: a foreign home or path would mix two installations.
    for name in ("PYTHONHOME", "PYTHONPATH"):
        environment.pop(name, None)
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    return environment


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where tritonserver listens."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def http_target(self) -> str:
        """Host a local client connects to."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host


def server_command(
    installation: TritonInstallation,
    repository: Path,
    address: ServerAddress,
    *,
    shm_prefix: str,
    control_key_file: Path,
    drain_s: int,
    verbose: bool,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return tritonserver's argv.

    Args:
        installation: the binary.
        repository: filled model repository.
        address: ports.
        shm_prefix: prefix of the stubs' /dev/shm regions, by which they are found again.
        control_key_file: holds the value of the header that unlocks loading models and other administration; it stays
            out of the arguments, which every user of the machine can read.
        drain_s: seconds SIGTERM waits for requests in flight.
        verbose: also log at info level.
        extra: further flags of the user.
    """
    restricted = f"{RESTRICTED_APIS}:dspark-control={{file:{control_key_file}}}"
    command = [
        str(installation.binary),
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--http-address={address.host}",
        f"--grpc-address={address.host}",
        f"--metrics-address={address.host}",
        f"--http-port={address.http_port}",
        f"--grpc-port={address.grpc_port}",
        f"--metrics-port={address.metrics_port}",
        f"--http-restricted-api={restricted}",
        f"--grpc-restricted-protocol={restricted}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--exit-timeout-secs={drain_s}",
        f"--log-info={str(verbose).lower()}",
        "--disable-auto-complete-config",
        f"--allow-gpu-metrics={str(os.path.exists('/dev/nvidiactl')).lower()}",
    ]
    if installation.backend_directory is not None:
        command.append(f"--backend-directory={installation.backend_directory}")
    return [*command, *extra]


def check_ports(host: str, ports: dict[str, int]) -> None:
    """Refuse ports that are out of range, named twice or in use, before anything is started.

    Raises:
        UsageError: naming the flag and the port.
    """
    seen: dict[int, str] = {}
    for flag, port in ports.items():
        if not 1 <= port <= 65535:
            raise UsageError(f"{flag} is {port}; choose 1..65535")
        if port in seen:
            raise UsageError(f"{seen[port]} and {flag} are both {port}; choose different ports")
        seen[port] = flag
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                reason = "is in use" if error.errno == 98 else f"cannot be used ({error.strerror})"
                raise UsageError(
                    f"port {port} on {host} {reason}; stop what uses it or choose another {flag}"
                ) from error
