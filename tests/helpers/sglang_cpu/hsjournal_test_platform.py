"""A platform on which stock SGLang serves on a plain CPU. For tests only.

SGLang's own CPU platform wants vLLM's kernels (through RotaryEmbedding) and AMX; an out-of-tree one gets torch's
native implementations. This module imports nothing of hsjournal's: it runs in SGLang's environment.
"""

from __future__ import annotations

from typing import Any


def activate() -> str:
    """The entry point of group ``sglang.srt.platforms``: the dotted path of the platform's class."""
    return f"{__name__}.PlainCpuPlatform"


def __getattr__(name: str) -> Any:
    # Made on demand: the class's base is importable only once SGLang asks for the platform.
    if name != "PlainCpuPlatform":
        raise AttributeError(name)
    globals()[name] = _platform_class()
    return globals()[name]


def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities

    class PlainCpuPlatform(CpuSRTPlatform):  # type: ignore[misc]
        """The stock CPU platform, served by torch alone."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def init_backend(self) -> None:
            # torch_native has no rule of its own for MLA and gets triton's: plain attention where no request of a pass
            # has a prefix. But it reads K and V back from the pool, which holds MLA's compressed latent: such passes come
            # out wrong, with or without us. The absorbed form reads just that latent.
            from sglang.srt.models.deepseek_common import attention_backend_handler as handler

            handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)

        def get_kv_pool_cls(self, *, kind: str) -> type | None:
            from sglang.srt.mem_cache import memory_pool

            names = {"mha": "MHATokenToKVPool", "mla": "MLATokenToKVPool"}
            return getattr(memory_pool, names[kind]) if kind in names else None

        def get_paged_allocator_cls(self) -> type | None:
            return None

    return PlainCpuPlatform
