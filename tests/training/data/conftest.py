"""Use a separate cache for copies of corpora, not the user's."""

import datasets
import pytest


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield
