"""The fixed texts of a report's renderings, in English and Chinese.

Numbers and names stand in the report and are shown as they are; what checks say of themselves (summaries,
evidence, details, notes) has its Chinese in ``phrases``. A key that is not here is a bug: KeyError.
Justified length: one table, two lines a text, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

Lang = Literal["en", "zh"]
LANGS: tuple[Lang, ...] = ("en", "zh")


class Say(Protocol):
    """A text by its key, with values for its fields."""

    def __call__(self, key: str, /, **values: object) -> str: ...


def speaker(lang: Lang) -> Say:
    """The function that says everything in ``lang``."""
    column = LANGS.index(lang)

    def say(key: str, /, **values: object) -> str:
        return TEXTS[key][column].format(**values)

    return say


def check_title(name: str, say: Callable[..., str]) -> str:
    """What a check of this name asks; "" for one that is not known here."""
    for prefix, key in (
        ("regression.", "check.regression"),
        ("vs_other.task:", "check.vs_other.task"),
        ("task:", "check.task"),
        ("latency_", "check.latency"),
        ("cell ", "check.cell"),
        ("goodput_", "check.goodput"),
    ):
        if name.startswith(prefix):
            return say(key, name=name.removeprefix(prefix))
    text = TEXTS.get(f"check.{name}", ("{",))[0]
    return "" if "{" in text else say(f"check.{name}")  # one with a field is the title of names that begin so


def task_title(name: str, say: Callable[..., str]) -> str:
    """A kind of prompt, or its name where it is the user's own."""
    return say(f"task.{name}") if f"task.{name}" in TEXTS else name


TEXTS: dict[str, tuple[str, str]] = {
    # verdicts
    "PASS": ("PASS", "通过"),
    "FAIL": ("FAIL", "未通过"),
    "INCONCLUSIVE": ("INCONCLUSIVE", "无定论"),
    "SKIPPED": ("SKIPPED", "跳过"),
    "ERROR": ("ERROR", "错误"),
    "MEASURED": ("measured", "仅测量"),
    "approximate": (", approximate", "（近似）"),
    "approximate-label": (
        "(approximate: sampled output is not the target's law)",
        "（近似：采样输出不服从目标模型的分布）",
    ),
    "passed": (
        "{passed} of {required} required checks passed",
        "{required} 项必需检查中 {passed} 项通过",
    ),
    "of-required": ("{word}: {names}", "{word}：{names}"),
    "not-measured": ("no valid measurement: {names}", "测量无效：{names}"),
    "joined": ("; ", "；"),
    "in-brackets": ("{word} ({text})", "{word}（{text}）"),
    "verdict-line": ("verdict: {text}", "结论：{text}"),
    "headline": ("{name}: {text}", "{name}：{text}"),
    "not-required": ("; not a required check", "；本项非必需"),
    "warning": ("warning: {text}", "警告：{text}"),
    "note": ("note: {text}", "注：{text}"),
    "how": ("how: {text}", "测法：{text}"),
    # the table of checks
    "checks": ("Checks", "检查"),
    "check": ("check", "检查"),
    "verdict": ("verdict", "结论"),
    "required": ("required", "必需"),
    "measured": ("measured", "测得"),
    "interval": ("95 % interval", "95 % 区间"),
    "gate": ("gate", "门槛"),
    "n": ("n", "样本数"),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
    "range": ("{low} to {high}", "{low} 至 {high}"),
    "at least": ("at least {bound}", "不低于 {bound}"),
    "at most": ("at most {bound}", "不高于 {bound}"),
    "unit.requests": ("requests", "个请求"),
    "unit.prompts": ("prompts", "条提示"),
    "unit.tokens": ("tokens", "个词元"),
    "unit.texts": ("texts", "篇文本"),
    "unit.divergences": ("divergences", "处分歧"),
    "unit.tokens/step": ("tokens/step", "词元/步"),
    "unit.draws": ("draws", "次抽样"),
    "unit.items": ("items", "道题"),
    "unit.answers": ("answers", "个回答"),
    "unit.parameters": ("parameters", "个参数"),
    "unit.nats": ("nats", "奈特"),
    "unit.times BF16": ("times BF16", "倍于 BF16"),
    "unit.ms": ("ms", "毫秒"),
    "unit.ms TTFT p50": ("ms TTFT p50", "毫秒（TTFT p50）"),
    "unit.tokens/s": ("tokens/s", "词元/秒"),
    "unit.slices": ("slices", "个时间片"),
    "unit.cells": ("cells", "格"),
    "unit.loads": ("loads", "种负载"),
    "check.lossless": (
        "Greedy answers with speculation are those without it",
        "推测解码的贪心输出与不推测时一致",
    ),
    "check.lossless_float64": ("The same in float64, the proof", "float64 下的同一检查（证明）"),
    "check.greedy": (
        "Greedy answers with drafts are those without them",
        "有草稿时的贪心输出与无草稿时一致",
    ),
    "check.greedy_float64": ("The same in float64", "float64 下的同一检查"),
    "check.quality": (
        "Perplexity against the baseline",
        "相对基线的困惑度",
    ),
    "check.acceptance": ("Tokens a target step emits", "目标模型每步产生的词元数"),
    "check.speedup": (
        "Speed against the same weights without speculation",
        "相对同权重无推测的速度",
    ),
    "check.speedup_over_baseline": ("Speed against the 16-bit baseline", "相对 16 位基线的速度"),
    "check.approximate_likelihood": (
        "Likelihood of what approximate acceptance samples",
        "近似接受所采样文本的似然",
    ),
    "check.approximate_repetition": (
        "Repetition in what approximate acceptance samples",
        "近似接受所采样文本的重复度",
    ),
    "check.regression": ("{name} against the stored report", "{name} 相对存下的报告"),
    "check.task": ("Task {name} against the baseline", "任务 {name} 相对基线"),
    "check.gates_of_quality": ("Other weights are judged by gates of quality", "权重不同时由质量门槛判定"),
    "check.sampled": ("Sampled answers follow the target's law", "采样输出服从目标模型的分布"),
    "check.sampling_parameters": (
        "Sampling parameters are obeyed while drafting",
        "推测时采样参数是否生效",
    ),
    "check.mean_kl": (
        "Divergence of the next token's law from the baseline",
        "下一词元分布相对基线的散度",
    ),
    "check.p99_kl": ("Tail of that divergence", "该散度的尾部"),
    "check.same_top_token": (
        "Tokens with the baseline's most likely token",
        "最可能词元与基线相同的占比",
    ),
    "check.degenerate_text": ("Answers that are no text", "退化的输出（空、单词元、循环）"),
    "check.latency": ("Latency of {name} under load", "负载下的延迟：{name}"),
    "check.goodput": ("Requests of {name} within the objectives", "满足服务目标的请求：{name}"),
    "check.p99_ttft": ("Tail of the time to the first token under load", "负载下首词元延迟的尾部"),
    "check.p99_tpot": ("Tail of the time per token under load", "负载下每词元用时的尾部"),
    "check.throughput": ("Throughput under load", "负载下的吞吐量"),
    "check.speedup_over_baseline_under_load": (
        "Throughput under load against the 16-bit baseline",
        "负载下相对 16 位基线的吞吐",
    ),
    "check.speedup_under_load": (
        "Throughput against the same weights without speculation",
        "相对同权重无推测的吞吐量",
    ),
    "check.token_counter": ("Both sides count tokens alike", "双方的词元计数一致"),
    "check.baseline_without_speculation": ("The baseline does not speculate", "基线不做推测解码"),
    "check.speedup_by_load": ("Speed gained by drafting, load by load", "各负载下推测解码带来的加速"),
    "check.prediction": (
        "Speedup that the cost model predicts, over the measured one",
        "成本模型预测的加速与实测之比",
    ),
    "check.draft_scan": ("Draft lengths or trees beside the one in use", "其他草稿长度或树与所用者的比较"),
    "check.evidence": ("The measurement can count as evidence", "测量结果可作为证据"),
    "check.cell": ("Format and drafter: {name}", "量化格式与推测方法：{name}"),
    "check.interaction_w4a16_kv8": (
        "Do 4-bit weights and the 8-bit cache lose more together than each?",
        "4 位权重与 8 位缓存合用的损失是否大于各自之和",
    ),
    "check.gates": ("Gates of the recipe that nothing here answers", "此处未作回答的配方门槛"),
    "check.matrix": ("Formats and drafters, cell by cell", "量化格式与推测方法的矩阵"),
    "check.other.lossless": (
        "OTHER's greedy answers are those of the same weights without drafts",
        "OTHER 的贪心输出与同权重无推测时一致",
    ),
    "check.other.lossless_float64": (
        "The same of OTHER in float64, the proof",
        "OTHER 在 float64 下的同一检查（证明）",
    ),
    "check.other.greedy": (
        "OTHER's greedy answers with drafts are those without them",
        "OTHER 有草稿时的贪心输出与无草稿时一致",
    ),
    "check.other.greedy_float64": ("The same of OTHER in float64", "OTHER 在 float64 下的同一检查"),
    "check.other.speedup": (
        "Speed of OTHER against the same weights without speculation",
        "OTHER 相对同权重无推测的速度",
    ),
    "check.vs_other.identity": ("Greedy answers of both engines agree", "两个引擎的贪心输出一致"),
    "check.vs_other.acceptance": (
        "Tokens a target step emits, against OTHER",
        "目标模型每步产生的词元数，相对 OTHER",
    ),
    "check.vs_other.speedup": ("Speed against OTHER", "相对 OTHER 的速度"),
    "check.vs_other.speedup_by_load": ("Speed against OTHER, load by load", "各负载下相对 OTHER 的速度"),
    "check.vs_other.quality": ("Perplexity against OTHER", "相对 OTHER 的困惑度"),
    "check.vs_other.mean_kl": (
        "Divergence of the next token's law from OTHER's",
        "下一词元分布相对 OTHER 的散度",
    ),
    "check.vs_other.p99_kl": ("Its tail", "其尾部"),
    "check.vs_other.same_top_token": (
        "Tokens with OTHER's most likely token",
        "最可能词元与 OTHER 相同的占比",
    ),
    "check.vs_other.task": ("Task {name} against OTHER", "任务 {name} 相对 OTHER"),
    "check.vs_other.retrieval": ("Retrieval from a long context, against OTHER", "长上下文检索，相对 OTHER"),
    "check.vs_other.degenerate_text": (
        "Answers that are no text, against OTHER",
        "退化的输出，相对 OTHER",
    ),
    "check.retrieval": ("Retrieval from a long context", "长上下文检索"),
    # the page
    "title": ("Verification of {name}", "{name} 的验证报告"),
    "contents": ("Contents", "目录"),
    "details": ("Check by check", "逐项说明"),
    "evidence": ("Evidence", "证据"),
    "numbers": ("Numbers", "数据"),
    "plots": ("Plots", "图"),
    "notes": ("Notes", "说明"),
    "provenance": ("What it ran on", "运行环境"),
    "recipe": ("Recipe", "配方"),
    "engine": ("engine", "引擎"),
    "fidelity": ("fidelity of sampled output", "采样输出的保真度"),
    "strict": ("strict", "严格"),
    "approximate-word": ("approximate", "近似"),
    "recipe-digest": ("recipe digest", "配方摘要值"),
    "source-digest": ("source digest", "源检查点摘要值"),
    "date": ("date", "日期"),
    "duration": ("{seconds} s", "{seconds} 秒"),
    "command": ("command", "命令"),
    "machine": ("machine", "机器"),
    "versions": ("versions", "版本"),
    "built-with": ("built with", "构建时的版本"),
    "settings": ("settings", "设置"),
    "unknown-processor": ("unknown processor", "未知处理器"),
    "no-checks": ("no check was run", "没有运行任何检查"),
    "sentence": ("{title}. {text}", "{title}。{text}"),
    "item": ("{name}: {text}", "{name}：{text}"),
    # the answers
    "ask.lossless": ("lossless?", "无损？"),
    "ask.acceptance": ("acceptance?", "接受方式？"),
    "ask.quality": ("good enough?", "质量够用？"),
    "ask.faster": ("faster?", "更快？"),
    "ask.load": ("at which load?", "在何种负载下？"),
    "answer.yes": ("yes", "是"),
    "answer.no": ("no", "否"),
    "answer.undecided": ("undecided", "未定"),
    "answer.passed-only": ("passed", "通过"),
    "answer.not-run": ("not run", "未运行"),
    "answer.approximate-by-design": ("approximate, as the recipe says", "按配方为近似"),
    "answer.no-gate": ("measured, no gate asks", "已测量，无门槛"),
    "answer.not-shown": ("not shown", "未能表明"),
    "answer.slower": ("slower", "更慢"),
    "answer.contradiction": ("no measurement", "未测得"),
    "answer.loads.bare": (
        "{n} loads, timed too few times for intervals: from {low} ({worst}) to {high} ({best})",
        "{n} 种负载，计时次数太少而无区间：从 {low}（{worst}）到 {high}（{best}）",
    ),
    "answer.loads": (
        "{n} loads: from {low} ({worst}) to {high} ({best})",
        "{n} 种负载：从 {low}（{worst}）到 {high}（{best}）",
    ),
    "answer.between": ("{low} to {high}", "{low} 至 {high}"),
    "listed": (", ", "、"),
    "terminal-head": (
        "recipe {digest}, {processor}, {created}, {seconds} s",
        "配方 {digest}，{processor}，{created}，{seconds} 秒",
    ),
    "terminal-head.url": (
        "{processor}, {created}, {seconds} s",
        "{processor}，{created}，{seconds} 秒",
    ),
    # plots
    "plot.acceptance": (
        "Steps that accepted at least i drafted tokens",
        "至少接受 i 个草稿词元的步数占比",
    ),
    "plot.acceptance.x": ("position i in the draft", "草稿中的位置 i"),
    "plot.acceptance.y": ("share of steps", "步数占比"),
    "plot.acceptance.text": (
        "{first} of {steps} steps accepted at least one drafted token.",
        "{steps} 步中有 {first} 至少接受了一个草稿词元。",
    ),
    "plot.tasks": ("Tokens a step by kind of prompt", "各类提示每步的词元数"),
    "plot.tasks.x": ("tokens a step (1: no gain)", "每步词元数（1 表示无收益）"),
    "plot.speedup": ("Speedup with 95 % intervals", "加速比及其 95 % 区间"),
    "plot.speedup.bare": ("Speedup, timed too few times for intervals", "加速比（计时次数太少，无区间）"),
    "plot.speedup.x": ("times as fast (1: no gain)", "倍速（1 表示无收益）"),
    "plot.speedup.text": (
        "{name}: {value}, interval {low} to {high}.",
        "{name}：{value}，区间 {low} 至 {high}。",
    ),
    "plot.latency": ("Time of a request", "请求用时"),
    "plot.latency.x": ("seconds, prompt included", "秒，含提示处理"),
    "plot.latency-of": ("Distribution of {metric}", "{metric} 的分布"),
    "plot.latency.text": ("Median of {name}: {value}.", "{name}的中位数：{value}。"),
    "plot.latency.few": ("{name}: too few ({n}) for a median.", "{name}：太少（{n}），给不出中位数。"),
    "plot.margins": ("Divergences and rounding noise: {name}", "分歧与舍入噪声：{name}"),
    "plot.margins.x": ("gap between the two tokens, nats", "两词元之差（奈特）"),
    "plot.margins.usual": ("usual noise", "常见噪声"),
    "plot.margins.largest": ("largest noise", "最大噪声"),
    "plot.margins.text": (
        "{count} divergences; usual noise {usual} nats, largest {largest}.",
        "{count} 处分歧；常见噪声 {usual} 奈特，最大 {largest}。",
    ),
    "plot.kl": ("Tail of the KL divergence: {name}", "KL 散度尾部：{name}"),
    "plot.kl.x": ("share of tokens beyond", "超过该值的词元占比"),
    "plot.kl.y": ("KL, nats", "KL（奈特）"),
    "plot.kl.text": ("Largest value shown: {value} nats.", "图中最大值：{value} 奈特。"),
    "plot.matrix": ("Matrix: {name}", "矩阵：{name}"),
    "plot.matrix.text": (
        "{rows} rows, {columns} columns. Mark and frame: the verdict. Number and shade: times as fast as "
        "BF16 without drafts, from orange (slower) to blue (faster).",
        "{rows} 行，{columns} 列。记号与边框：结论。数字与底色：相对无草稿 BF16 的倍速，橙色较慢，蓝色较快。",
    ),
    "plot.matrix.corner": ("quantization / drafting", "量化 / 草稿"),
    "plot.position": ("position", "位置"),
    "plot.prompt": ("prompt", "提示"),
    "plot.token": ("token", "词元"),
    "plot.gap": ("gap", "差"),
    "task.chat": ("chat", "对话"),
    "task.code": ("code", "代码"),
    "task.summarization": ("summarization", "摘要"),
    "task.translation": ("translation", "翻译"),
    "task.copy": ("copy", "复制"),
    "side.recipe": ("recipe", "配方"),
    "side.no_speculation": ("no speculation", "无推测"),
    "side.baseline": ("16-bit baseline", "16 位基线"),
    "side.url": ("url", "被测端点"),
    "side.endpoint": ("baseline", "基线端点"),
    "side.other": ("OTHER", "OTHER（第二个引擎）"),
    "against-other": ("against OTHER: {engine}", "相对 OTHER：{engine}"),
    "other": ("OTHER", "OTHER（第二个引擎）"),
    "other-digest": ("recipe digest of OTHER", "OTHER 的配方摘要值"),
    # pitfalls
    "pitfalls": ("Pitfalls", "常见误区"),
    "pitfalls.intro": (
        "Nine ways in which such measurements mislead. They decide no verdict; an open one says what the "
        "verdict does not cover.",
        "这类测量误导人的九种方式。它们不影响结论；“未回答”者说明结论没有涵盖什么。",
    ),
    "pitfall": ("pitfall", "误区"),
    "status": ("status", "状态"),
    "found": ("found", "所见"),
    "to-run": ("to run", "可运行"),
    "answered": ("answered", "已回答"),
    "open": ("open", "未回答"),
    "does not apply": ("does not apply", "不适用"),
    "pitfalls.count": (
        "pitfalls: {answered} answered, {rest} do not apply, {open} open, to run",
        "常见误区：{answered} 项已回答，{rest} 项不适用，{open} 项未回答，可运行",
    ),
    "pitfall.by-check": ("answered by {checks}", "由 {checks} 回答"),
    "pitfall.wrong-baseline": ("Wrong baseline", "基线不当"),
    "pitfall.wrong-baseline.yes": (
        "{checks}: same hardware, engine, prompts, lengths and token counter, in turn",
        "{checks}：相同的硬件、引擎、提示、长度与词元计数，交替测量",
    ),
    "pitfall.wrong-baseline.none": (
        "the recipe neither speculates nor quantizes: it is the baseline",
        "配方既不推测也不量化：它就是基线",
    ),
    "pitfall.wrong-baseline.missing": ("not measured: {checks}", "未测量：{checks}"),
    "pitfall.wrong-baseline.apart": (
        "the two sides ran one after the other, so a change of the machine between them shows as speed",
        "两侧先后运行，其间机器状态的变化会表现为速度差异",
    ),
    "pitfall.wrong-baseline.run": (
        "trtspec verify {engine} on an idle machine",
        "在空闲机器上运行 trtspec verify {engine}",
    ),
    "pitfall.alpha-without-tau": ("Acceptance rate without acceptance length", "只报接受率、不报接受长度"),
    "pitfall.alpha-without-tau.yes": (
        "both stand together: rate {rate}, {length} tokens a step",
        "两者并列：接受率 {rate}，每步 {length} 个词元",
    ),
    "pitfall.alpha-without-tau.none": ("the recipe does not speculate", "配方不使用推测"),
    "pitfall.alpha-without-tau.missing": (
        "rate and length of acceptance are not both known",
        "接受率与接受长度未同时测得",
    ),
    "pitfall.alpha-without-tau.run": (
        "trtspec verify {engine} with prompts on which the drafter finds something (--prompts)",
        "用草稿器能命中的提示（--prompts）运行 trtspec verify {engine}",
    ),
    "pitfall.unquantized-draft": ("Draft not quantized", "草稿模型未量化"),
    "pitfall.unquantized-draft.yes": (
        "the draft model is quantized too: {format}",
        "草稿模型也已量化：{format}",
    ),
    "pitfall.unquantized-draft.plain": ("nothing is quantized", "没有量化"),
    "pitfall.unquantized-draft.none": ("drafting uses no weights", "草稿不使用权重"),
    "pitfall.unquantized-draft.heads": (
        "{kind} heads stay in 16 bit: small beside the target, and their time is in the measured speed",
        "{kind} 头保持 16 位：与目标模型相比很小，其用时已计入测得的速度",
    ),
    "pitfall.unquantized-draft.model": (
        "the target is quantized and the draft model is not: its share of a round grows",
        "目标模型已量化而草稿模型没有：它在每轮中的用时占比变大",
    ),
    "pitfall.unquantized-draft.run": (
        "set speculation.quantization in the recipe, build, and trtspec verify again",
        "在配方中设置 speculation.quantization，重新构建并再次运行 trtspec verify",
    ),
    "pitfall.untested-together": ("Two approximations untested together", "两种近似未一起检验"),
    "pitfall.untested-together.none": (
        "the recipe has at most one approximation",
        "配方至多有一种近似",
    ),
    "pitfall.untested-together.kv": (
        "quality is scored with quantized weights and KV cache together",
        "质量在权重与 KV 缓存同时量化的条件下评分",
    ),
    "pitfall.untested-together.kv-missing": (
        "weights and KV cache are quantized, and quality was not measured",
        "权重与 KV 缓存均已量化，但未测量质量",
    ),
    "pitfall.untested-together.both": (
        "quantization and approximate acceptance were each judged alone: their losses may add up to more",
        "量化与近似接受是分别评判的：两者的损失合起来可能更大",
    ),
    "pitfall.untested-together.run": (
        "trtspec verify {engine} with a check of sampled answers against the 16-bit baseline",
        "运行 trtspec verify {engine}，并加入采样输出相对 16 位基线的检查",
    ),
    "pitfall.one-load": ("One load only", "只测一种负载"),
    "pitfall.one-load.yes": ("{count} loads were measured", "测量了 {count} 种负载"),
    "pitfall.one-load.none": (
        "the recipe neither speculates nor quantizes",
        "配方既不推测也不量化",
    ),
    "pitfall.one-load.one": (
        "speed was measured one request at a time: in a batch, verifying drafts costs more, and the gain can "
        "vanish",
        "速度是逐个请求测得的：成批时验证草稿的代价更高，收益可能消失",
    ),
    "pitfall.build-first": (
        "build the recipe (trtspec build), then {text}",
        "先构建该配方（trtspec build），再{text}",
    ),
    "pitfall.one-load.run.url": (
        "trtspec verify {engine} --concurrency N, with the load that will be served",
        "以实际服务的负载运行 trtspec verify {engine} --concurrency N",
    ),
    "pitfall.one-load.run": (
        "trtspec verify {engine} --load, or measure the batch that will be served",
        "运行 trtspec verify {engine} --load，或测量实际服务时的批量",
    ),
    "pitfall.tail-ignored": ("P99 ignored", "忽略 P99"),
    "pitfall.tail-ignored.yes": ("p99 stands in {check}", "{check} 给出 p99"),
    "pitfall.tail-ignored.missing": (
        "only totals were measured: drafts that fail cost most where users wait longest",
        "只测了总量：失败的草稿恰恰在用户等待最久处代价最大",
    ),
    "pitfall.tail-ignored.run.url": (
        "trtspec verify {engine} --requests 600",
        "运行 trtspec verify {engine} --requests 600",
    ),
    "pitfall.tail-ignored.run": (
        "trtspec verify {engine} --latency --requests 500",
        "运行 trtspec verify {engine} --latency --requests 500",
    ),
    "pitfall.lazy-lossless": ("Losslessness claimed, not shown", "声称无损而未证明"),
    "pitfall.lazy-lossless.yes": (
        "{check} compares token by token; {refused} second choices of the target were refused as drafts",
        "{check} 逐词元比较；目标模型的次优词元作为草稿有 {refused} 个被拒绝",
    ),
    "pitfall.lazy-lossless.none": ("the recipe does not speculate", "配方不使用推测"),
    "pitfall.lazy-lossless.approximate": (
        "nothing is called lossless; {checks} judge what is sampled",
        "未声称无损；由 {checks} 评判采样输出",
    ),
    "pitfall.lazy-lossless.approximate-missing": (
        "acceptance is approximate, and what it samples was not judged",
        "接受是近似的，而其采样输出未经评判",
    ),
    "pitfall.lazy-lossless.missing": (
        "no comparison token by token in which drafts had to be refused has decided",
        "没有得出定论的、要求拒绝草稿的逐词元比较",
    ),
    "pitfall.lazy-lossless.run.url": (
        "trtspec verify ENGINE where the engine's folder is: only there can near misses be offered as drafts",
        "在引擎文件夹所在处运行 trtspec verify ENGINE：只有那里能把近似次优词元作为草稿",
    ),
    "pitfall.lazy-lossless.run": (
        "trtspec verify {engine} with more, longer answers, where two copies of the weights in float64 fit",
        "在能容纳两份 float64 权重的机器上，以更多更长的回答运行 trtspec verify {engine}",
    ),
    "pitfall.untuned-draft": ("Draft length or tree not tuned", "草稿长度或树未调优"),
    "pitfall.untuned-draft.yes": ("{check} has scanned others", "{check} 扫描了其他取值"),
    "pitfall.untuned-draft.none": ("the recipe does not speculate", "配方不使用推测"),
    "pitfall.untuned-draft.adaptive": (
        "each draft is cut to what pays (speculation.adaptive)",
        "每个草稿都裁剪到划算的部分（speculation.adaptive）",
    ),
    "pitfall.untuned-draft.given": (
        "the recipe's draft was taken as given: another length or tree may be faster on this load",
        "直接采用了配方中的草稿：在此负载上，别的长度或树可能更快",
    ),
    "pitfall.untuned-draft.served": (
        "the server's draft was taken as it is: another length or tree may be faster on this load",
        "直接采用了服务端的草稿：在此负载上，别的长度或树可能更快",
    ),
    "pitfall.untuned-draft.run.url": (
        "serve it with another draft and trtspec verify {engine} again",
        "换一种草稿部署后再次运行 trtspec verify {engine}",
    ),
    "pitfall.untuned-draft.run": ("trtspec verify {engine} --scan", "trtspec verify {engine} --scan"),
    "pitfall.long-context": ("Long context", "长上下文"),
    "pitfall.long-context.yes": (
        "the longest sequence had {longest} of at most {limit} tokens",
        "最长序列 {longest} 个词元，上限 {limit}",
    ),
    "pitfall.long-context.short": (
        "the longest sequence had {longest} tokens, the engine takes {limit}: acceptance, speed and the KV "
        "cache's quality are not known there",
        "最长序列 {longest} 个词元，而引擎允许 {limit}：那里的接受率、速度与 KV 缓存质量未知",
    ),
    "pitfall.long-context.unknown": (
        "the length of what was measured is not recorded",
        "没有记录所测序列的长度",
    ),
    "pitfall.long-context.run": (
        "trtspec verify {engine} --prompts FILE, with prompts as long as those to be served",
        "用与实际服务同样长的提示运行 trtspec verify {engine} --prompts FILE",
    ),
}  # fmt: skip
