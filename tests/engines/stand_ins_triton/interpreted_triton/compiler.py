"""The half of the backend that would compile kernels."""

from triton.backends.compiler import BaseBackend


class InterpretedCompiler(BaseBackend):
    """Is never asked."""

    @staticmethod
    def supports_target(target: object) -> bool:
        del target
        return True

    def hash(self) -> str:
        return ""

    def parse_options(self, options: object) -> object:
        return options

    def add_stages(self, stages: object, options: object) -> None:
        raise NotImplementedError

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, object]:
        return {}
