"""What a run is, key by key."""

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.runtime.models import identity as run_identities
from slipstream.runtime.models.identity import build_run_identity, digest_sources
from slipstream.runtime.run_identity import (
    RunIdentity,
    combine_identities,
    describe_difference,
    list_differences,
)
from tests.runtime.running import tiny

DATA = {"training data": "0123"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model that needs a module.

    The module needs another one within a function.
    """
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/parts.py").write_text("WIDTH = 4\n")
    (tmp_path / "helper.py").write_text(
        "def width():\n    from package.parts import WIDTH\n    return WIDTH\n"
    )
    (tmp_path / "some_model.py").write_text(
        "import json, torch\nfrom helper import width\n\nclass Model: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def identity(microbatches=(2, 2), **training) -> RunIdentity:
    return build_run_identity(
        tiny(**training), data=DATA, microbatches=microbatches, columns=((0, 1), (2, 3))
    )


def test_equal_runs_have_no_difference():
    assert identity() == identity() and describe_difference(identity(), identity()) is None


def test_a_difference_names_the_key_and_both_values():
    assert (
        describe_difference(identity(learning_rate=0.002), identity())
        == "training.learning_rate is 0.002 here and 0.001 in the run"
    )
    assert (
        describe_difference(identity(clip_norm=1.0), identity(), "there")
        == "training.clip_norm is 1.0 there and not given in the run"
    )
    assert (
        describe_difference(identity((1, 3)), identity())
        == "grid.microbatches is [1,3] here and [2,2] in the run"
    )
    assert (
        describe_difference(replace(identity(), data={"training data": "4567"}), identity())
        == "the training data are not the same here and in the run"
    )
    assert describe_difference(
        replace(identity(), libraries={"torch": "2.0"}), identity()
    ).startswith("numpy is not")


def test_keys_of_tables_are_named_too():
    muon = {"optimizer": "muon", "options": {"mix": {"web": 1.5}}}
    assert (
        describe_difference(identity(muon={"momentum": 0.9}, **muon), identity(**muon))
        == "training.muon.momentum is 0.9 here and 0.95 in the run"
    )
    assert (
        describe_difference(identity(**{**muon, "options": {"mix": {"web": 2}}}), identity(**muon))
        == "training.options.mix.web is 2 here and 1.5 in the run"
    )


def test_all_differences_are_listed():
    ours = identity((1, 3), learning_rate=0.002)
    assert len(list_differences(ours, identity())) == 2


def test_what_changes_no_number_makes_no_difference(tmp_path):
    assert identity(recompute="full", peak_flops=1e12) == identity()
    assert identity(text=str(tmp_path)) == identity()  # the digest of the data says what is there


def test_a_difference_is_one_line_of_text():
    sly = replace(identity(), training={"learning_rate": "1\n\x1b[2Jnothing" + "x" * 1000})
    clause = describe_difference(sly, replace(identity(), training={"learning_rate": "1"}))
    assert clause.isprintable() and len(clause) < 300


def test_the_ranks_of_a_worker_have_one_identity_together():
    """Whichever of them differs, it is not that of the run."""
    run, other = identity(), identity(learning_rate=0.002)
    assert combine_identities([run, run]) == run
    for ranks in ([run, other], [other, run]):
        assert (
            describe_difference(combine_identities(ranks), run, "there")
            == "training.learning_rate is 0.001 or 0.002 there and 0.001 in the run"
        )


def test_a_users_modules_are_digested_and_no_library(here):
    assert sorted(digest_sources(["some_model:Model"])) == [
        "helper",
        "package",
        "package.parts",
        "some_model",
    ]


@pytest.mark.parametrize("name", ["some_model.py", "helper.py", "package/parts.py"])
def test_an_edited_module_makes_a_difference(name, here):
    model = replace(tiny().model, name="some_model:Model")
    config = replace(tiny(), model=model)

    def digest() -> RunIdentity:
        return build_run_identity(config, data=DATA, microbatches=(2,), columns=((0,),))

    before = digest()
    (here / name).write_text((here / name).read_text() + "# edited\n")
    module = name.removesuffix(".py").replace("/", ".")
    assert (
        describe_difference(digest(), before, "there")
        == f"the source of module {module} is not the same there and in the run"
    )


def test_code_that_cannot_be_parsed_is_digested_by_itself(here):
    (here / "some_model.py").write_text("import helper\n)")
    assert list(digest_sources(["some_model:Model"])) == ["some_model"]


def test_relative_imports_are_followed(here):
    (here / "package/model.py").write_text("from . import parts\nfrom .more import thing\n")
    (here / "package/more.py").write_text("thing = 1\n")
    assert sorted(digest_sources(["package.model:build"])) == [
        "package",
        "package.model",
        "package.more",
        "package.parts",
    ]


def test_packages_that_are_installed_anywhere_are_libraries(here, monkeypatch):
    """As by `pip install --target`, with PYTHONPATH naming the folder."""
    (here / "libraries/some_library-1.0.dist-info").mkdir(parents=True)
    (here / "libraries/some_library.py").write_text("")
    (here / "some_model.py").write_text("import some_library, helper")
    monkeypatch.syspath_prepend(here / "libraries")
    run_identities._list_library_folders.cache_clear()
    digests = digest_sources(["some_model:Model"])
    run_identities._list_library_folders.cache_clear()
    assert "helper" in digests and "some_library" not in digests
