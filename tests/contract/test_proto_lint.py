"""The contract keeps buf's rules, and the generated code says what the .proto files say."""

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
FILES = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("isobatch/**/*.proto"))
# What protoc writes into gencode that grpcio-tools 1.81.1 carries; an older runtime refuses it.
GENCODE_VERSION = "# Protobuf Python Version: 6.33.5"


def buf(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run buf from this environment on the contract."""
    command = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if command is None:
        pytest.skip("buf is not installed")
    return subprocess.run([command, *arguments], cwd=PROTOS, capture_output=True, check=False)


def test_buf_finds_nothing() -> None:
    result = buf("lint")
    assert result.returncode == 0, result.stdout.decode()


@pytest.fixture(scope="module")
def compiled() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """What the .proto files say now, by file name."""
    result = buf("build", "--as-file-descriptor-set", "--exclude-source-info", "--output", "-")
    assert result.returncode == 0, result.stderr.decode()
    found = descriptor_pb2.FileDescriptorSet.FromString(result.stdout)
    return {file.name: file for file in found.file}


def module_name(file: str) -> str:
    """The Python module generated from a .proto file."""
    return file.removesuffix(".proto").replace("/", ".") + "_pb2"


def without_json_names(
    file: descriptor_pb2.FileDescriptorProto,
) -> descriptor_pb2.FileDescriptorProto:
    """`file` without the names that buf derives for JSON, which gencode does not hold."""
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages.extend(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")
    return file


@pytest.mark.parametrize("file", FILES)
def test_generated_code_is_up_to_date(
    file: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    generated = descriptor_pb2.FileDescriptorProto()
    import_module(module_name(file)).DESCRIPTOR.CopyToProto(generated)
    assert without_json_names(generated) == without_json_names(compiled[file]), "run: make protos"


@pytest.mark.parametrize("file", FILES)
def test_generated_code_is_of_the_pinned_compiler(file: str) -> None:
    path = PROTOS / "gen" / file.replace(".proto", "_pb2.py")
    assert GENCODE_VERSION in path.read_text().splitlines()


def test_no_generated_file_is_left_over() -> None:
    stems = {file.removesuffix(".proto") for file in FILES}
    suffixes = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    gen = PROTOS / "gen"
    present = {str(path.relative_to(gen)) for path in gen.rglob("*.py*") if path.suffix != ".pyc"}
    assert present == {stem + suffix for stem in stems for suffix in suffixes}


@pytest.mark.parametrize("file", FILES)
def test_zero_means_unspecified_in_every_enum(
    file: str, compiled: dict[str, descriptor_pb2.FileDescriptorProto]
) -> None:
    for enum in compiled[file].enum_type:
        zero = next(value for value in enum.value if value.number == 0)
        assert zero.name.endswith("_UNSPECIFIED")
