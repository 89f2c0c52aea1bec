"""The help of ``trtspec verify``: its many options by what they are about."""

from __future__ import annotations

import click

SECTIONS = {
    "What to judge, besides ENGINE by itself": (
        "other",
        "url",
        "baseline_url",
        "matrix",
        "self_test",
        "plan",
    ),
    "How much": (
        "quick",
        "prompts",
        "num_prompts",
        "max_new_tokens",
        "exact_prompts",
        "exact_tokens",
        "rounds",
    ),
    "Sampled answers": (
        *("sampled", "sampled_prompts", "sampled_tokens", "temperature", "bias", "outcomes", "power"),
    ),
    "Quality": (
        *("heldout", "quality_tokens", "tasks", "task_limit", "lm_eval", "lm_eval_path", "judge"),
        *("retrieval", "retrieval_copies", "retrieval_tokens"),
    ),
    "Speed under load": (
        *("latency", "requests", "concurrency", "rate", "slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms"),
        *("min_goodput", "load", "load_tokens", "load_batch", "scan", "driver", "aiperf"),
    ),
    "Two endpoints (--url)": (
        *("model", "baseline_model", "protocol", "api_key_env", "timeout", "acceptance", "other_weights"),
        *("parameters", "draft_tokens", "tokenizer", "gates", "min_speedup", "max_perplexity_ratio"),
        *("max_task_loss", "max_retrieval_loss", "max_degenerate_rise"),
    ),
    "Formats by drafters (--matrix)": ("matrix_dir", "heads", "draft"),
    "Report": (*("output", "markdown", "html", "junit", "lang", "bundle", "against", "json_file", "help"),),
}
"""Title -> names of parameters; every option of the verb stands in one of them."""


def name_of(param: click.Parameter) -> str:
    """click's own name of --help differs by version."""
    return "help" if "--help" in param.opts else param.name or ""


class Sectioned(click.Command):
    """A command whose help lists options under titles."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = {name_of(param): param.get_help_record(ctx) for param in self.get_params(ctx)}
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := found.get(name)) is not None])
