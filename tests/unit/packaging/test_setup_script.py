"""scripts/setup: which machines and Pythons it takes, what it says otherwise, when it works again.

Each test copies the script into a small repository of its own and runs it with a PATH that holds
only fakes and a few system tools, so the machine's real Pythons and compilers are out of sight.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "setup"
TOOLS = ("cat", "cksum", "dirname", "find", "mkdir", "rm", "sh", "sort", "touch", "xargs")

# A Python that answers the script's questions from its name and notes what it is asked to do.
PYTHON = """#!/bin/sh
case "$2" in
*'raise SystemExit(sys.version_info'*) exit {too_old} ;;
'import ensurepip, venv') exit {no_venv} ;;
*version_info*) echo {version}; exit 0 ;;
*sysconfig*) echo "{headers}"; exit 0 ;;
esac
echo "{name} $*" >>"$LOG"
if [ "$2" = venv ]; then
    for folder; do :; done
    mkdir -p "$folder/bin"
    rm -f "$folder"/.isobatch-*
    cat "$0" >"$folder/bin/python"
    printf '#!/bin/sh\\necho "pip $*" >>"$LOG"\\n' >"$folder/bin/pip"
    /bin/chmod +x "$folder/bin/python" "$folder/bin/pip"
fi
"""


@dataclass
class Machine:
    """A repository with the script, and a PATH of fakes."""

    root: Path
    bin: Path
    log: Path

    def add(self, name: str, text: str) -> None:
        """Put an executable script named `name` on the PATH."""
        path = self.bin / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def add_python(
        self, name: str, version: str, *, has_venv: bool = True, has_headers: bool = True
    ) -> None:
        """Put a fake Python of `version` on the PATH."""
        too_old = tuple(int(part) for part in version.split(".")) < (3, 11)
        headers = self.root / "include"
        if has_headers:
            headers.mkdir(exist_ok=True)
            (headers / "Python.h").touch()
        self.add(
            name,
            PYTHON.format(
                name=name,
                version=version,
                too_old=int(too_old),
                no_venv=int(not has_venv),
                headers=headers,
            ),
        )

    def set_system(self, system: str, machine: str) -> None:
        """Make uname answer `system` and `machine`."""
        self.add("uname", f'[ "$1" = -s ] && echo {system} || echo {machine}')

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the script."""
        return subprocess.run(
            ["/bin/sh", str(self.root / "scripts" / "setup"), *arguments],
            env={"PATH": str(self.bin), "LOG": str(self.log), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def actions(self) -> list[str]:
        """What the fakes were asked to do since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A Linux machine with a C++ compiler and no Python yet."""
    root = tmp_path / "repository"
    for folder in ("scripts", "requirements", "kernels/isobatch_kernels/cpp"):
        (root / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts" / "setup")
    for name in ("run", "build", "dev", "uv"):
        (root / "requirements" / f"{name}.txt").write_text(f"{name}==1\n")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "kernels" / "CMakeLists.txt").write_text("project(x)\n")
    (root / "kernels" / "isobatch_kernels" / "cpp" / "ops.cpp").write_text("int one = 1;\n")
    made = Machine(root, tmp_path / "bin", tmp_path / "log")
    made.bin.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (made.bin / tool).symlink_to(found)
    made.set_system("Linux", "x86_64")
    made.add("g++", "exit 0")
    return made


def test_newest_known_python_wins(machine: Machine) -> None:
    for name, version in (("python3", "3.14"), ("python3.11", "3.11"), ("python3.12", "3.12")):
        machine.add_python(name, version)
    result = machine.setup("python")
    assert (result.returncode, result.stdout) == (0, "python3.12\n")


def test_old_pythons_are_passed_over(machine: Machine) -> None:
    machine.add_python("python3.12", "3.9")  # a name that lies, as a broken shim does
    machine.add_python("python3", "3.13")
    assert machine.setup("python").stdout == "python3\n"


def test_given_python_is_used(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12")
    machine.add_python("mine", "3.11")
    assert machine.setup("python", ISOBATCH_PYTHON="mine").stdout == "mine\n"


def test_given_python_must_be_new_enough(machine: Machine) -> None:
    machine.add_python("mine", "3.10")
    result = machine.setup("python", ISOBATCH_PYTHON="mine")
    assert result.returncode == 1
    assert "must be a native Python 3.11 or newer, got mine" in result.stderr


def test_python_without_venv_names_the_debian_package(machine: Machine) -> None:
    machine.add_python("python3", "3.11", has_venv=False)
    result = machine.setup()
    assert result.returncode == 1
    assert "apt-get install python3.11-venv" in result.stderr


def test_uv_on_path_gets_a_python(machine: Machine) -> None:
    machine.add_python("python3", "3.9")
    machine.add_python("fetched", "3.12")
    machine.add("uv", 'echo "uv $*" >>"$LOG"; [ "$2" = find ] && echo fetched; exit 0')
    assert machine.setup("python").stdout == "fetched\n"
    assert machine.actions() == [
        "uv python install 3.12",
        "uv python find --managed-python 3.12",
    ]


def test_uv_is_installed_where_there_is_none(machine: Machine) -> None:
    machine.add_python("python3", "3.9")
    result = machine.setup("python")
    assert machine.actions() == [
        "python3 -m venv .venv-uv",
        "pip install -qq --require-hashes --only-binary :all: -r requirements/uv.txt",
    ]
    assert result.returncode != 0  # the fake pip installs nothing


def test_no_python_at_all_names_the_debian_packages(machine: Machine) -> None:
    result = machine.setup("python")
    assert result.returncode == 1
    assert "apt-get install python3 python3-venv" in result.stderr


def test_uv_that_gets_nothing_says_what_to_do(machine: Machine) -> None:
    machine.add("uv", "exit 1")
    result = machine.setup("python")
    assert result.returncode == 1
    assert "uv could not get Python 3.12; install Python 3.11 or newer" in result.stderr


@pytest.mark.parametrize(
    ("version", "accepted"), [("13.7.1", False), ("14.0", True), ("26.1", True)]
)
def test_macos_before_14_is_refused(machine: Machine, version: str, accepted: bool) -> None:
    machine.set_system("Darwin", "arm64")
    machine.add("sw_vers", f"echo {version}")
    machine.add_python("python3.12", "3.12")
    result = machine.setup("python")
    assert (result.returncode == 0) is accepted
    message = f"macOS 14 (Sonoma) or newer is needed, this is macOS {version}"
    assert (message in result.stderr) is not accepted


def test_intel_macs_are_refused(machine: Machine) -> None:
    machine.set_system("Darwin", "x86_64")
    machine.add_python("python3.12", "3.12")
    result = machine.setup()
    assert result.returncode == 1
    assert "Intel Macs are not supported" in result.stderr


def test_rosetta_shell_is_told_apart_from_an_intel_mac(machine: Machine) -> None:
    machine.set_system("Darwin", "x86_64")
    machine.add("sysctl", "echo 1")
    result = machine.setup()
    assert result.returncode == 1
    assert "runs under Rosetta" in result.stderr


@pytest.mark.parametrize(("system", "kind"), [("Linux", "riscv64"), ("FreeBSD", "amd64")])
def test_other_machines_are_refused_by_name(machine: Machine, system: str, kind: str) -> None:
    machine.set_system(system, kind)
    result = machine.setup()
    assert result.returncode == 1
    assert f"this is {system} ({kind})" in result.stderr


def test_missing_compiler_names_the_debian_package(machine: Machine) -> None:
    (machine.bin / "g++").unlink()
    machine.add_python("python3.12", "3.12")
    result = machine.setup()
    assert result.returncode == 1
    assert "apt-get install g++" in result.stderr


def test_missing_compiler_named_by_cxx_is_named(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12")
    result = machine.setup(CXX="g++-99 -O1")
    assert result.returncode == 1
    assert "was not found: g++-99 -O1" in result.stderr


def test_missing_headers_name_the_debian_package(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12", has_headers=False)
    result = machine.setup()
    assert result.returncode == 1
    assert "apt-get install python3-dev" in result.stderr


def test_mac_needs_no_compiler(machine: Machine) -> None:
    machine.set_system("Darwin", "arm64")
    machine.add("sw_vers", "echo 15.2")
    (machine.bin / "g++").unlink()
    machine.add_python("python3.12", "3.12", has_headers=False)
    assert machine.setup().returncode == 0


def test_first_call_makes_everything_and_the_second_nothing(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12")
    assert machine.setup().returncode == 0
    actions = machine.actions()
    assert actions[0] == "python3.12 -m venv --clear .venv"
    assert "--require-hashes" in actions[1]
    assert "-r requirements/run.txt -r requirements/build.txt -r requirements/dev.txt" in actions[1]
    assert actions[2].endswith("--no-deps --no-build-isolation --editable .")
    assert len(actions) == 3
    assert machine.setup().returncode == 0
    assert machine.actions() == []


def test_dev_holds_run_and_not_the_other_way_round(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12")
    machine.setup("run")
    assert not any("requirements/dev.txt" in action for action in machine.actions())
    machine.setup("dev")
    assert any("requirements/dev.txt" in action for action in machine.actions())
    machine.setup("run")
    assert machine.actions() == []


@pytest.mark.parametrize(
    ("changed", "packages", "isobatch"),
    [
        ("requirements/run.txt", True, True),
        ("requirements/build.txt", True, True),
        ("pyproject.toml", False, True),
        ("kernels/CMakeLists.txt", False, True),
        ("kernels/isobatch_kernels/cpp/ops.cpp", False, True),
        ("kernels/isobatch_kernels/cpp/new.h", False, True),
        ("kernels/README.md", False, False),
    ],
)
def test_works_again_when_what_matters_changes(
    machine: Machine, changed: str, packages: bool, isobatch: bool
) -> None:
    machine.add_python("python3.12", "3.12")
    machine.setup()
    machine.actions()
    with (machine.root / changed).open("a") as file:
        file.write("# changed\n")
    assert machine.setup().returncode == 0
    actions = machine.actions()
    assert any("-m venv --clear" in action for action in actions) is packages
    assert any("--require-hashes" in action for action in actions) is packages
    assert any("--editable" in action for action in actions) is isobatch


def test_a_broken_environment_is_made_again(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12")
    machine.setup()
    machine.actions()
    (machine.root / ".venv" / "bin" / "python").unlink()
    machine.setup()
    assert machine.actions()[0] == "python3.12 -m venv --clear .venv"


def test_a_failed_install_is_tried_again(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12")
    (machine.bin / "g++").unlink()
    assert machine.setup().returncode == 1
    machine.actions()
    machine.add("g++", "exit 0")
    assert machine.setup().returncode == 0
    assert len(machine.actions()) == 1  # the packages were there already


def test_a_given_wheel_is_installed_without_a_compiler(machine: Machine) -> None:
    machine.add_python("python3.12", "3.12")
    (machine.bin / "g++").unlink()
    wheel = machine.root / "isobatch-1-py3-none-any.whl"
    wheel.write_bytes(b"one")
    assert machine.setup(ISOBATCH_WHEEL=str(wheel)).returncode == 0
    assert machine.actions()[-1].endswith(f"--no-deps --force-reinstall {wheel}")
    wheel.write_bytes(b"two")
    machine.setup(ISOBATCH_WHEEL=str(wheel))
    assert len(machine.actions()) == 1


def test_another_folder_can_hold_the_environment(machine: Machine, tmp_path: Path) -> None:
    machine.add_python("python3.12", "3.12")
    assert machine.setup("packages", ISOBATCH_VENV=str(tmp_path / "elsewhere")).returncode == 0
    actions = machine.actions()
    assert actions[0] == f"python3.12 -m venv --clear {tmp_path / 'elsewhere'}"
    assert not any("--editable" in action for action in actions)


def test_unknown_argument_is_refused(machine: Machine) -> None:
    result = machine.setup("everything")
    assert result.returncode == 1
    assert "must be dev, run, packages or python, got everything" in result.stderr


def test_script_is_executable() -> None:
    assert os.access(SCRIPT, os.X_OK)
