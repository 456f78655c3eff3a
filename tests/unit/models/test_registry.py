"""Finding a model on this machine, and what is said when it is not here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from executor_service.errors import ConfigError, ModelError
from executor_service.models.cache import cache_folder
from executor_service.models.registry import ALIASES, DEFAULT_MODEL, alias_path, hub_folder, locate


def test_an_alias_is_a_file_in_the_cache(tmp_path: Path) -> None:
    environ = {"ISOBATCH_CACHE": str(tmp_path)}
    path = alias_path(DEFAULT_MODEL, environ)
    assert path.is_relative_to(tmp_path)
    with pytest.raises(ModelError, match=r": isobatch pull smollm2-135m-instruct$"):
        locate(DEFAULT_MODEL, environ=environ)
    path.parent.mkdir(parents=True)
    path.touch()
    found = locate(DEFAULT_MODEL, environ=environ)
    assert (found.path, found.model_id) == (path, DEFAULT_MODEL)
    assert locate(DEFAULT_MODEL, "mine", environ).model_id == "mine"


def test_aliases_name_a_digest_and_a_size() -> None:
    for alias in ALIASES.values():
        assert len(bytes.fromhex(alias.sha256)) == 32
        assert alias.num_bytes > 0
        assert alias.file_name.endswith(".gguf")


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "Some-Model.Q4_0.gguf"
    path.touch()
    assert locate(str(path)).model_id == "Some-Model.Q4_0"


def test_a_home_that_is_none_is_named() -> None:
    with pytest.raises(ModelError, match=r"the file must exist, got ~no such user/a\.gguf"):
        locate("~no such user/a.gguf")
    with pytest.raises(ConfigError, match="ISOBATCH_CACHE must be in a home that exists"):
        cache_folder({"ISOBATCH_CACHE": "~no such user"})
    assert hub_folder({"HF_HOME": "~no such user"}) == Path("~no such user/hub")


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    with pytest.raises(ModelError, match=r"must end in \.gguf, got .*weights\.bin"):
        locate(str(path))


def test_a_directory_is_a_model_or_holds_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"config\.json or one \.gguf file, got 0"):
        locate(str(folder))
    (folder / "a.gguf").touch()
    assert locate(str(folder)).path == folder / "a.gguf"
    (folder / "b.gguf").touch()
    with pytest.raises(ModelError, match="got 2"):
        locate(str(folder))
    (folder / "config.json").touch()
    found = locate(str(folder))
    assert (found.path, found.model_id) == (folder, "tiny")


def test_a_repository_is_found_in_the_hugging_face_cache(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    with pytest.raises(ModelError, match=r": isobatch pull some-owner/name$"):
        locate("some-owner/name", environ=environ)
    folder = tmp_path / "models--some-owner--name"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc\n")
    found = locate("some-owner/name", environ=environ)
    assert (found.path, found.model_id) == (snapshot, "some-owner/name")


def test_the_hugging_face_cache_follows_its_variables() -> None:
    assert hub_folder({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hub_folder({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hub_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")


@pytest.mark.parametrize(
    "name", ["/nope/x.gguf", "x.gguf", "models/x.gguf", "./models", "~/nope", "a/b/c"]
)
def test_a_path_that_leads_nowhere_is_named(name: str) -> None:
    with pytest.raises(
        ModelError, match=rf"^\[model\] the file must exist, got {re.escape(name)}$"
    ):
        locate(name)


def test_anything_else_is_refused_with_the_choices() -> None:
    with pytest.raises(ModelError, match=r"must be one of smollm2-135m-instruct, smollm2-draft, a"):
        locate("no such model")
