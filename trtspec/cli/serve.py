"""``trtspec serve`` and ``trtspec generate``: a Triton server for a built engine, and a client for it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from trtspec.cli.output import FloatRange, UserPath, json_option, print_json, print_warning
from trtspec.errors import InputError, MissingError
from trtspec.serve.protocol import BOUNDS
from trtspec.user_files import shown_path

if TYPE_CHECKING:
    from trtspec.artifact import Artifact
    from trtspec.serve.client import Finished
    from trtspec.serve.launch import Plan
    from trtspec.serve.preflight import Addresses


def _integer(field: str) -> click.IntRange:
    return click.IntRange(int(BOUNDS[field].low), int(BOUNDS[field].high))


def _number(field: str) -> FloatRange:
    return FloatRange(BOUNDS[field].low, BOUNDS[field].high)


_URL = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")
_PORT = click.IntRange(1, 65535)
_MAX_TIMEOUT_S = 1e6  # eleven days; the system's clocks take no more than some centuries
_PING_PROMPT = "one two three, one two three, one two"  # repeats itself: something to draft from
_PING_TOKENS = 16


@click.command()
@click.argument("engine_dir", type=UserPath())
@click.option("--host", help="Address to listen on (default: the recipe's; 0.0.0.0 opens it to the network).")
@click.option("--http-port", type=_PORT, help="Default: the recipe's.")
@click.option("--grpc-port", type=_PORT, help="Default: the recipe's.")
@click.option("--metrics-port", type=_PORT, help="Default: the recipe's.")
@click.option("--dry-run", is_flag=True, help="Print repository and command; start nothing.")
@click.option("--log", type=UserPath(), help="Append all output of server and model to this file.")
@click.option("--ready-file", type=UserPath(), help="Write the addresses here (JSON) when ready.")
@click.option(
    "--start-timeout",
    type=FloatRange(1, _MAX_TIMEOUT_S),
    default=300.0,
    show_default=True,
    help="Give up when the model is not loaded after this many seconds.",
)
@json_option
def serve(
    engine_dir: Path,
    host: str | None,
    http_port: int | None,
    grpc_port: int | None,
    metrics_port: int | None,
    dry_run: bool,
    log: Path | None,
    ready_file: Path | None,
    start_timeout: float,
    as_json: bool,
) -> None:
    """Serve the engine in ENGINE_DIR with Triton until Ctrl-C.

    Tensors and meanings are those of NVIDIA's Triton model for TensorRT-LLM's LLM API. When the server is
    ready, one short request is sent through it and its acceptance printed. The first Ctrl-C (or SIGTERM)
    lets requests in flight finish, the second stops at once.

    Engines of GPU backends are served in NVIDIA's container; --dry-run prints their files and the command.
    """
    from trtspec.artifact import open_artifact
    from trtspec.recipe_facts import describe_acceptance, fidelity
    from trtspec.serve import launch
    from trtspec.serve.preflight import Addresses, resolve_host

    artifact = open_artifact(engine_dir)
    if artifact.recipe.backend.kind != "embedded":
        options = {
            "--host": host, "--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port
        }  # fmt: skip
        paths = {"log": log, "ready_file": ready_file}
        given = click.get_current_context().get_parameter_source("start_timeout")
        timeout = start_timeout if given is ParameterSource.COMMANDLINE else None
        _serve_in_container(artifact, options, paths, timeout, dry_run=dry_run, as_json=as_json)
        return
    serving = artifact.recipe.serving
    drafting = describe_acceptance(artifact.recipe)
    if artifact.recipe.speculation.kind != "none":
        drafting = f"{artifact.recipe.speculation.kind}, {drafting}"
    addresses = Addresses(
        host=resolve_host(serving.host if host is None else host),
        http_port=http_port or serving.http_port,
        grpc_port=grpc_port or serving.grpc_port,
        metrics_port=metrics_port or serving.metrics_port,
    )
    if addresses.is_public:
        print_warning(
            f"{addresses.host} is reachable from other machines: this Triton has no authentication and "
            "can be crashed by a malformed request; keep it behind a proxy"
        )
    if dry_run:
        _print_plan(artifact, addresses, as_json=as_json)
        return

    if log is not None and ready_file is not None and os.path.realpath(log) == os.path.realpath(ready_file):
        raise InputError("--log and --ready-file name the same file; give each its own")

    def say(line: str) -> None:
        click.echo(line, err=True)

    def on_ready(plan: Plan) -> dict[str, Any]:
        finished = _ping(plan)
        fields = {**_ready_fields(plan, finished), "fidelity": fidelity(artifact.recipe)}
        if as_json:
            print_json("serve", fields)
            sys.stdout.flush()
        else:
            _print_ready(plan, finished, drafting)
        return fields

    say(f"starting Triton for {artifact.recipe.name} ...")
    launch.serve(
        artifact,
        addresses,
        on_ready=on_ready,
        say=say,
        log=log,
        ready_file=ready_file,
        start_timeout_s=start_timeout,
    )
    say("stopped")


@click.command()
@click.argument("prompt", required=False)
@click.option("--engine", type=UserPath(), help="Engine folder: its addresses and chat template.")
@click.option(
    "--url", help="gRPC address of the server, host:port (default: the engine's, else 127.0.0.1:8001)."
)
@click.option("--model-name", help="Default: the engine's, else tensorrt_llm.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--max-tokens", type=_integer("max_tokens"), help="Default: the server's.")
@click.option("--temperature", type=_number("temperature"), help="0 is greedy (the default).")
@click.option("--top-k", type=_integer("top_k"), help="0 keeps all tokens.")
@click.option("--top-p", type=_number("top_p"), help="1 keeps all tokens.")
@click.option("--seed", type=_integer("seed"), help="Default: a fresh one.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be repeated.")
@click.option("--stats", is_flag=True, help="Print acceptance and times on stderr.")
@click.option(
    "--idle-timeout",
    type=FloatRange(0.1, _MAX_TIMEOUT_S),
    default=120.0,
    show_default=True,
    help="Give up after this many seconds without a new piece of the answer.",
)
@json_option
def generate(
    prompt: str | None,
    engine: Path | None,
    url: str | None,
    model_name: str | None,
    raw: bool,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    stats: bool,
    idle_timeout: float,
    as_json: bool,
) -> None:
    """Generate text with a served engine, streamed to the terminal.

    PROMPT - (or none) reads standard input. With --engine the prompt becomes a user's message in the
    model's chat template, if it has one; without, or with --raw, it is sent as it is.
    """
    from trtspec.serve.client import Finished, check_engine, served_acceptance, stream
    from trtspec.serve.protocol import Generate

    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise InputError("the prompt is empty; give PROMPT or pipe one in")
    if engine is not None:
        from trtspec.artifact import open_artifact
        from trtspec.text import Tokenizer

        artifact = open_artifact(engine)
        if artifact.recipe.backend.kind == "tensorrt":
            from trtspec.trtllm.launch import curl_example

            raise MissingError(
                "backend.kind: tensorrt: its server has the tensors of NVIDIA's C++ backend, which generate "
                f"does not speak; ask it with: {curl_example(artifact.recipe)}"
            )
        serving = artifact.recipe.serving
        url = url or f"{'127.0.0.1' if serving.host == '0.0.0.0' else serving.host}:{serving.grpc_port}"
        model_name = model_name or serving.model_name
        if not raw:
            tokenizer = Tokenizer.load(artifact.target_dir)
            if tokenizer.has_chat_template:
                prompt = tokenizer.render_chat([{"role": "user", "content": prompt}])
    request = Generate(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        return_perf_metrics=stats or as_json,
    )
    url, model_name = _checked_url(url or "127.0.0.1:8001"), model_name or "tensorrt_llm"
    if engine is not None:
        check_engine(url, model_name, artifact.recipe.name, artifact.manifest.recipe_digest, idle_timeout)
    answer = stream(
        url,
        model_name,
        request,
        idle_timeout_s=idle_timeout,
    )
    # Closing the stream, also on Ctrl-C or a closed pipe, cancels the request.
    with contextlib.closing(answer) as pieces:
        for piece in pieces:
            if isinstance(piece, Finished):
                label = served_acceptance(url, model_name, idle_timeout) if stats or as_json else None
                _print_finished(piece, label, stats=stats, as_json=as_json)
            elif not as_json:
                click.echo(piece, nl=False)
                sys.stdout.flush()


def _checked_url(url: str) -> str:
    match = _URL.fullmatch(url)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise InputError(
            f"--url: {shown_path(ascii(url))} is not host:port of a gRPC server (for example 127.0.0.1:8001)"
        )
    return url


def _print_finished(finished: Finished, acceptance: str | None, *, stats: bool, as_json: bool) -> None:
    if as_json:
        fields: dict[str, Any] = {
            "text": finished.text,
            "finish_reason": finished.finish_reason,
            "stop_reason": finished.stop_reason,
            "ttft_ms": finished.ttft_ms,
            "tpot_ms": finished.tpot_ms,
            "acceptance": acceptance,
            **finished.statistics,
        }
        print_json("generate", fields)
        return
    click.echo()
    if stats:
        label = "" if acceptance is None else f", {acceptance}"
        click.echo(_statistics_line(finished) + label, err=True)


def _statistics_line(finished: Finished) -> str:
    found = finished.statistics
    parts = [f"{found.get('num_output_tokens', '?')} tokens ({finished.finish_reason})"]
    if "acceptance_length" in found:
        parts.append(f"acceptance length {found['acceptance_length']:.2f} (tokens per target step)")
    if found.get("total_draft_tokens"):
        accepted, drafted = found["total_accepted_draft_tokens"], found["total_draft_tokens"]
        parts.append(f"acceptance rate {found['acceptance_rate']:.2f} ({accepted} of {drafted} drafted)")
    if finished.ttft_ms is not None:
        parts.append(f"TTFT {finished.ttft_ms:.0f} ms")
    if finished.tpot_ms is not None:
        parts.append(f"TPOT {finished.tpot_ms:.1f} ms")
    return ", ".join(parts)


def _ping(plan: Plan) -> Finished:
    """One short request through the whole path; MissingError when it does not come back right."""
    from trtspec.serve.client import generate as ask
    from trtspec.serve.protocol import Generate

    addresses = plan.addresses
    url = f"{addresses.reachable_host}:{addresses.grpc_port}"
    request = Generate(prompt=_PING_PROMPT, max_tokens=_PING_TOKENS, return_perf_metrics=True)
    try:
        finished = ask(url, plan.model_name, request, idle_timeout_s=120.0)
    except InputError as error:
        raise MissingError(f"the server is up but refused a first request: {error}") from None
    found = finished.statistics
    if not 1 <= found.get("num_output_tokens", 0) <= _PING_TOKENS:
        raise MissingError(f"the server is up but answered a first request wrongly: {finished}")
    return finished


def _ready_fields(plan: Plan, finished: Finished) -> dict[str, Any]:
    host = plan.addresses.reachable_host
    return {
        "pid": os.getpid(),
        "model_name": plan.model_name,
        "http": f"http://{host}:{plan.addresses.http_port}",
        "grpc": f"{host}:{plan.addresses.grpc_port}",
        "metrics": f"http://{host}:{plan.addresses.metrics_port}/metrics",
        "server_id": plan.server_id,
        "ping": {"text": finished.text, **finished.statistics},
    }


def _print_ready(plan: Plan, finished: Finished, drafting: str) -> None:
    fields = _ready_fields(plan, finished)
    curl = "curl -s -H 'Content-Type: application/json'"
    model_url = f"{fields['http']}/v2/models/{plan.model_name}"
    body = '"text_input": "Hello", "sampling_param_max_tokens": 16'
    streamed = '"streaming": true, "text_delta": true'
    for line in (
        f"ready: model {plan.model_name}",
        f"  drafting {drafting}",
        f"  http     {fields['http']}",
        f"  grpc     {fields['grpc']}",
        f"  metrics  {fields['metrics']}",
        f"  ping     {_PING_PROMPT!r} -> {finished.text!r}",
        f"           {_statistics_line(finished)}",
        f"try: {curl} {model_url}/generate -d '{{{body}}}'",
        f"     {curl} -N {model_url}/generate_stream -d '{{{body}, {streamed}}}'",
        "Ctrl-C stops",
    ):
        click.echo(line)
    sys.stdout.flush()


def _serve_in_container(
    artifact: Artifact,
    options: dict[str, str | int | None],
    paths: dict[str, Path | None],
    start_timeout: float | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve a GPU backend's engine by its rendered repository and script, if this is NVIDIA's container;
    ``dry_run`` shows them."""
    from trtspec.artifact import TRTLLM_DIR
    from trtspec.gpu_plan import ENGINE_MOUNT, read_rendered
    from trtspec.trtllm.launch import LAUNCH_FILE, curl_example, docker_command

    if given := [option for option, value in options.items() if value is not None]:
        raise InputError(
            f"{', '.join(given)}: the files of this engine were rendered with the recipe's addresses; change "
            "serving in the recipe and build it again"
        )
    rendered = read_rendered(artifact)
    root = artifact.folder / TRTLLM_DIR
    if rendered is None or not (root / LAUNCH_FILE).is_file():
        raise InputError(
            f"{shown_path(artifact.folder)}: this engine has no Triton repository; run trtspec build again, "
            "which renders one or says why Triton cannot serve the recipe"
        )
    script = f"{ENGINE_MOUNT}/{TRTLLM_DIR}/{LAUNCH_FILE}"
    command = docker_command(str(artifact.folder.resolve()), script, ENGINE_MOUNT)
    if not dry_run:
        from trtspec.serve.container import START_TIMEOUT_S, serve_here, server_here

        try:
            server = server_here(rendered.version)
        except MissingError as error:
            raise MissingError(
                f"backend.kind: {artifact.recipe.backend.kind}: served by Triton in NVIDIA's container, not "
                f"here ({error}); --dry-run prints its files; the command is: {command}"
            ) from None

        def say(line: str) -> None:
            click.echo(line, err=True)

        say(f"starting Triton with TensorRT-LLM {rendered.version} for {artifact.recipe.name} ...")
        serve_here(
            artifact,
            server,
            on_ready=lambda: _container_ready(artifact, as_json=as_json),
            say=say,
            start_timeout_s=start_timeout or START_TIMEOUT_S,
            **paths,
        )
        say("stopped")
        return
    prefix = f"{TRTLLM_DIR}/"
    names = sorted(name for name in artifact.manifest.files if name.startswith(f"{prefix}triton/"))
    files = {name: (artifact.folder / name).read_text() for name in [*names, f"{prefix}{LAUNCH_FILE}"]}
    ask = curl_example(artifact.recipe)
    if as_json:
        fields = {"files": files, "command": command, "ask": ask, "tensorrt_llm": rendered.version}
        print_json("serve", {**fields, "label": rendered.label})
        return
    for name, content in files.items():
        click.echo(f"==> {name}\n{content}")
    click.echo(f"==> {rendered.label}\n{command}\n\n==> ask it\n{ask}")


def _container_ready(artifact: Artifact, *, as_json: bool) -> dict[str, Any]:
    """Print where the engine is served. Of the LLM API's model, after a short request through it."""
    from trtspec.serve.client import generate as ask
    from trtspec.serve.protocol import Generate
    from trtspec.trtllm.launch import curl_example

    serving = artifact.recipe.serving
    host = "127.0.0.1" if serving.host == "0.0.0.0" else serving.host
    fields: dict[str, Any] = {
        "pid": os.getpid(),
        "model_name": serving.model_name,
        "http": f"http://{host}:{serving.http_port}",
        "grpc": f"{host}:{serving.grpc_port}",
        "metrics": f"http://{host}:{serving.metrics_port}/metrics",
    }
    finished = None
    if artifact.recipe.backend.kind == "pytorch":
        request = Generate(prompt=_PING_PROMPT, max_tokens=_PING_TOKENS, return_perf_metrics=True)
        finished = ask(fields["grpc"], serving.model_name, request)
        fields["ping"] = {"text": finished.text, **finished.statistics}
    if as_json:
        print_json("serve", fields)
    else:
        click.echo(f"ready: model {serving.model_name}")
        for name in ("http", "grpc", "metrics"):
            click.echo(f"  {name:<8} {fields[name]}")
        if finished is not None:
            click.echo(f"  ping     {_PING_PROMPT!r} -> {finished.text!r}")
            click.echo(f"           {_statistics_line(finished)}")
        click.echo(f"try: {curl_example(artifact.recipe)}\nCtrl-C stops")
    sys.stdout.flush()
    return fields


def _print_plan(artifact: Artifact, addresses: Addresses, *, as_json: bool) -> None:
    from trtspec.serve.launch import make_plan
    from trtspec.serve.preflight import find_installation

    plan = make_plan(artifact, addresses, find_installation(), Path("RUNTIME"), "trtspec-ID-")
    files = {name: content.decode() for name, content in plan.files.items()}
    links = {name: str(target) for name, target in plan.links.items()}
    if as_json:
        fields = {"files": files, "links": links, "argv": list(plan.argv), "environment": plan.environment}
        print_json("serve", fields)
        return
    for name, content in files.items():
        click.echo(f"==> RUNTIME/{name}\n{content}")
    click.echo("==> links")
    for name, target in links.items():
        click.echo(f"RUNTIME/{name} -> {target}")
    click.echo("\n==> environment")
    for name, value in plan.environment.items():
        click.echo(f"{name}={shlex.quote(value)}")
    click.echo(f"\n==> command\n{shlex.join(plan.argv)}")
