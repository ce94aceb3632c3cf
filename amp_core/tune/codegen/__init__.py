"""The code for a recipe: plain PyTorch, Accelerate, Transformers, Lightning (`templates/` has one template each)."""

from amp_core.tune.codegen.programs import FRAMEWORKS, LABELS, SUPPORTED_PRECISIONS, code_for

__all__ = ["FRAMEWORKS", "LABELS", "SUPPORTED_PRECISIONS", "code_for"]
