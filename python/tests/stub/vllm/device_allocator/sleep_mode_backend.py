from abc import ABC, abstractmethod


class SleepModeBackend(ABC):
    def __init__(self):
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level=1): ...

    @abstractmethod
    def resume(self, tags=None): ...

    def state(self):
        return self._state

    def discard(self, tags):
        raise RuntimeError("not supported")


class SleepModeBackendFactory:
    names = {}

    @classmethod
    def register_backend(cls, name, module, kind):
        if name in cls.names:
            raise ValueError(f"'{name}' is already registered")
        cls.names[name] = (module, kind)
