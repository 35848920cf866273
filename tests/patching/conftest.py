import pytest
from patch_project import edited_files, make_patches, stock_files, write_tree

from envpipe_megatron.patching import catalog as known_patches
from envpipe_megatron.patching.catalog import load_catalog


@pytest.fixture(scope="session")
def patches(tmp_path_factory):
    """The folder of the made-up project's patches."""
    return make_patches(tmp_path_factory.mktemp("project"))


@pytest.fixture
def install(monkeypatch):
    """Gives the package other patches than its own, and returns them."""

    def install(folder):
        monkeypatch.setattr(known_patches, "shipped_folder", lambda name: folder)
        return load_catalog()

    return install


@pytest.fixture
def catalog(install, patches):
    return install(patches)


@pytest.fixture
def checkout(tmp_path, catalog):
    """A stock checkout of v1.0."""
    return write_tree(tmp_path / "checkout", stock_files(0))


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """Patches of modules only, as a later release may have them for the same tags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "patch_project.edited_files",
            lambda minor: {**edited_files(minor), "run.sh": stock_files(minor)["run.sh"]},
        )
        return make_patches(tmp_path_factory.mktemp("modules"))
