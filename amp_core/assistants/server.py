"""The tools of `ampscope mcp`: the answers as JSON text, over standard input and output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from amp_core._version import __version__
from amp_core.assistants.answers import Answers
from amp_core.assistants.bounded import NOTE, as_text, bounded, sentence
from amp_core.schema import RunError
from amp_core.store.urls import with_extra

INSTRUCTIONS = (
    "Recorded mixed-precision trainings of PyTorch models: loss scale, skipped steps, underflow, tensor cores, memory, "
    f"speed. Start with list_runs, then diagnose_run. All tools only read. {NOTE}"
)


def make_server(roots: list[Path]) -> Any:
    """An `MCPServer` over the runs below `roots`. Raises `RunError` where the package `mcp` is missing."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import ToolAnnotations
    except ImportError:
        raise RunError(f"ampscope mcp needs the package mcp, version 2 or newer; {with_extra('mcp')}") from None
    answers = Answers(roots)
    server = MCPServer(name="ampscope", title="AMPscope", instructions=INSTRUCTIONS, version=__version__)

    def answer(function: Callable[..., dict[str, Any]], *arguments: Any) -> str:
        try:
            return as_text(bounded(function(*arguments)))
        except RunError as error:
            raise ToolError(sentence(error)) from None

    def tool(title: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
        # One text per answer: a structured copy beside it would double its size.
        register: Callable[[Callable[..., str]], Callable[..., str]] = server.tool(
            title=title, annotations=ToolAnnotations(read_only_hint=True), structured_output=False
        )
        return register

    @tool("List runs")
    def list_runs(contains: str = "") -> str:
        """The newest recorded runs: precision, workload, device, status, steps, last loss, skipped steps.

        `contains` filters by a part of the name.
        """
        return answer(answers.list_runs, contains)

    @tool("Diagnose a run")
    def diagnose_run(run: str, baseline: str = "") -> str:
        """What is wrong with a run, the worst first: tensor or call, evidence, advice, patch.

        `baseline` names an FP32 run of the same task to compare with.
        """
        return answer(answers.diagnose, run, baseline)

    @tool("Compare runs")
    def compare_runs(runs: list[str]) -> str:
        """Speed, memory and convergence of 2 to 12 runs of one task; the first is the baseline."""
        return answer(answers.compare, runs)

    @tool("What if: 8 and 4 bits")
    def what_if(run: str, formats: list[str], limit: float = 0.15) -> str:
        """Predicted error of each linear layer in FP8, MXFP8, NVFP4 and so on, and the layers below `limit`.

        The run needs recorded blocks (`watch(…, blocks=True)`).
        """
        return answer(answers.what_if, run, formats, limit)

    @tool("Safe loss scales")
    def loss_scale_window(run: str, number_format: str = "fp16") -> str:
        """Loss scales that suit every gradient of the run, the recommended one, and those that it used."""
        return answer(answers.loss_scale_window, run, number_format)

    @tool("Layers worst off")
    def worst_layers(run: str, count: int = 20) -> str:
        """Layers with the most underflow in FP16, the loss scales that suit each, and the format to use."""
        return answer(answers.worst_layers, run, count)

    @tool("Kernels off tensor cores")
    def kernels_off_tensor_cores(run: str, count: int = 20) -> str:
        """GEMM, convolution and attention kernels of a profiled run that do not use tensor cores, the longest first."""
        return answer(answers.kernels_off_tensor_cores, run, count)

    @tool("Read the guide")
    def read_guide(code: str = "") -> str:
        """What a finding's code means, how it is detected, its threshold and fix; without a code, all codes."""
        return answer(answers.guide, code)

    return server
