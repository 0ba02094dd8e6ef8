"""Imported by every Python that starts with this folder on its path: makes ``import torchvision`` work. For tests only.

Every process of an SGLang server is a fresh interpreter, and each imports torchvision before any plugin runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from pathlib import Path
from typing import Any

# By its path: the folder above holds modules that would hide installed ones.
_SCHEMAS = Path(__file__).resolve().parents[1] / "torchvision_schemas.py"


class _SchemasFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.util.spec_from_file_location("hsjournal_torchvision_schemas", _SCHEMAS)
            assert spec is not None
            assert spec.loader is not None
            schemas = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = schemas  # it keeps the definitions alive
            spec.loader.exec_module(schemas)
            schemas.define()


sys.meta_path.insert(0, _SchemasFirst())
