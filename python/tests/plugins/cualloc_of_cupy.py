"""A plugin of pytest with which CuPy's own tests run on cualloc: pytest -p cualloc_of_cupy"""

import pytest


def pytest_configure(config):
    import cualloc.cupy

    cualloc.cupy.install()


def pytest_collection_modifyitems(items):
    for item in items:
        asked = getattr(item, "callspec", None)
        if "managed" in item.nodeid.lower() or asked and asked.params.get("managed"):
            item.add_marker(pytest.mark.skip(reason="managed memory is no memory of ours"))


@pytest.fixture(autouse=True)
def cualloc_is_the_allocator():
    """Tests that set another allocator leave that of CuPy behind."""
    import cupy

    import cualloc.cupy

    cupy.cuda.set_allocator(cualloc.cupy.malloc)


def pytest_terminal_summary(terminalreporter):
    from cualloc import _library

    _library.check(0)
    terminalreporter.write_line(f"cualloc served {_library.stats(0).blocks.total} blocks, the check is clean")
