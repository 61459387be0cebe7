"""A plugin of pytest with which RMM's own tests run on cualloc: pytest -p cualloc_of_rmm"""

import pytest


def pytest_configure(config):
    import cualloc.rmm

    cualloc.rmm.install()


def pytest_collection_modifyitems(items):
    for item in items:
        asked = getattr(item, "callspec", None)
        if "managed" in item.nodeid.lower() or asked and asked.params.get("managed"):
            item.add_marker(pytest.mark.skip(reason="managed memory is no memory of ours"))


@pytest.fixture(autouse=True)
def cualloc_is_the_resource(rmm_auto_reinitialize):
    """After each of them RMM's tests take memory of the driver for the next one."""
    import rmm

    import cualloc.rmm

    rmm.mr.set_current_device_resource(cualloc.rmm.resource())


def pytest_terminal_summary(terminalreporter):
    from cualloc import _library

    _library.check(0)
    terminalreporter.write_line(f"cualloc served {_library.stats(0).blocks.total} blocks, the check is clean")
