class CuMemAllocator:
    @staticmethod
    def get_instance():
        raise AssertionError("vLLM's own allocator was asked for")
