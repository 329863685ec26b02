"""The command line of `spillway check`, and what it prints."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import msgspec
import yaml

from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.finding import Finding
from spillway_ctl.check.judgement import findings
from spillway_ctl.check.typed_values import whole
from spillway_ctl.check.values_files import merged_values, read_values
from spillway_ctl.check.vllm_parser import vllm_verdicts
from spillway_ctl.errors import CommandError
from spillway_ctl.named_text import read_named
from spillway_ctl.run import JSON_FORMAT, OK
from spillway_settings.shared_names import CUSTOM_KINDS

REFUSED = 1
RENDERED_KEY = "values.yaml"  # of the Secret that the chart's hook mounts
_DESCRIPTION = """\
Are these values of the chart right? Keys, types and bounds by the chart's schema, then everything that holds between
settings. Nothing is rendered and no cluster is asked. Files are merged as Helm merges them, the last one wins.
"""
_EPILOG = """\
exit status:
  0    the values are right; what most clusters or servers would refuse is printed as a note
  1    they cannot work; each mistake is one sentence
  2    the command is wrong, or a file cannot be read

examples:
  spillway check my-values.yaml
  spillway check base.yaml production.yaml --set engine.replicas=4 --kube-version 1.31 --json
  spillway check umbrella-values.yaml --part spillway       values of a chart that has this one as its part
  spillway check my-values.yaml --vllm 0.32=/opt/vllm     extraArgs by the parser of the vLLM installed there
  spillway check my-values.yaml --vllm 0.23=/opt/a --vllm 0.32=/opt/b     each engine by its own image.vllm
  helm template chat charts/spillway -f my-values.yaml | spillway check --rendered -
"""


class _Set(argparse.Action):
    """--set and --set-string in the order in which they are given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.assignments = [*namespace.assignments, (values, option == "--set-string")]


def add_check(areas: Any) -> None:
    parser = areas.add_parser(
        "check",
        help="whether values of the chart are right, before anything is installed",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="values; - for standard input")
    parser.add_argument("-f", "--values", action="append", default=[], metavar="FILE", help="as Helm's")
    parser.add_argument("--set", action=_Set, dest="assignments", default=[], metavar="KEY=VALUE", help="as Helm's")
    parser.add_argument("--set-string", action=_Set, dest="assignments", metavar="KEY=VALUE", help="as Helm's")
    parser.add_argument("--part", metavar="KEY", help="the values lie below this key, as those of a parent chart do")
    parser.add_argument("--rendered", metavar="FILE", help="output of helm template; - for standard input")
    parser.add_argument(
        "--whole", action="store_true", help="the values have every default; what is missing was removed by null"
    )
    parser.add_argument("--release", default="chat", metavar="NAME", help="of the release (default: %(default)s)")
    parser.add_argument("-n", "--namespace", default="default", metavar="NAME", help="of the release")
    parser.add_argument(
        "--kube-version", type=_version, metavar="VERSION", help="of the cluster; without it no field is too new"
    )
    parser.add_argument(
        "--api-versions",
        metavar="KINDS",
        help="what is installed in the cluster, with commas: monitoring.coreos.com/v1/PodMonitor,... (default: all)",
    )
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="VERSION[=FOLDER]",
        help="have extraArgs of the engines whose image.vllm this is judged by its own parser too: 0.32 of the "
        "environment in which this command runs, or of that in FOLDER; once for each version; takes as long as vLLM's "
        "imports",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of sentences")


def check(given: argparse.Namespace, out: TextIO | None = None) -> int:
    """Print what is wrong with the values; the exit status. Raises CommandError."""
    out = out if out is not None else sys.stdout
    values = _values(given)
    if given.part is None and given.rendered is not None:
        given.part = _part_of_rendered(values)
    if given.part is not None:
        values = _part(values, given.part)
    found = findings(whole(values) if given.whole or given.rendered else values, _cluster(given))
    unjudged: dict[str, str] = {}
    if given.vllm:
        by_vllm = vllm_verdicts(values, given.vllm)
        found, unjudged = found + by_vllm.findings, by_vllm.unjudged
    if given.part is not None:
        found = [msgspec.structs.replace(finding, setting=f"{given.part}.{finding.setting}") for finding in found]
        unjudged = {f"{given.part}.{path}": version for path, version in unjudged.items()}
    print(_document(found, unjudged) if given.json else _text(found, unjudged), file=out, flush=True)
    return REFUSED if any(not finding.is_note for finding in found) else OK


def rendered_values(text: str) -> dict[str, Any]:
    """The values in what helm template printed: the Secret of the chart's hook has them. Raises CommandError."""
    try:
        documents = [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if isinstance(each, dict)]
    except yaml.YAMLError as error:
        raise CommandError(f"what was rendered is no YAML ({error}); give the output of helm template") from error
    for document in documents:
        labels = (document.get("metadata") or {}).get("labels") or {}
        is_check = labels.get("app.kubernetes.io/component") == "check"
        if is_check and document.get("kind") == "Secret" and RENDERED_KEY in (document.get("stringData") or {}):
            return read_values(document["stringData"][RENDERED_KEY], RENDERED_KEY)
    raise CommandError(
        "no values are in what was rendered; give the output of helm template of charts/spillway with checks.hook: "
        "true, without --no-hooks"
    )


def _values(given: argparse.Namespace) -> dict[str, Any]:
    files = [*given.files, *given.values]
    if given.rendered is not None:
        if files or given.assignments:
            raise CommandError("--rendered has the values already; give files and --set to helm template instead")
        return rendered_values(read_named(given.rendered, "--rendered"))
    if not files and not given.assignments:
        raise CommandError("no values given; write spillway check FILE, or - for standard input")
    return merged_values(files, given.assignments)


def _part_of_rendered(values: Mapping[str, Any]) -> str | None:
    """The key above the values of a chart that is a part of another one; they have every section otherwise."""
    return None if "engine" in values else next((key for key in values if key != "global"), None)


def _part(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    part = values.get(key)
    if not isinstance(part, dict):
        raise CommandError(f"--part {key}: the values have no such map; known: {', '.join(values) or 'none'}")
    return {**part, **({"global": values["global"]} if "global" in values else {})}


def _cluster(given: argparse.Namespace) -> Cluster:
    kinds = CUSTOM_KINDS if given.api_versions is None else tuple(filter(None, given.api_versions.split(",")))
    return Cluster(given.kube_version, frozenset(kinds), given.release, given.namespace, given.part is None)


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"v?([0-9]+)\.([0-9]+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} given, a version such as 1.32 needed")
    return int(found[1]), int(found[2])


def _document(found: Iterable[Finding], unjudged: Mapping[str, str]) -> str:
    listed = [{**msgspec.to_builtins(finding), "sentence": finding.sentence} for finding in found]
    document = {"format": JSON_FORMAT, "command": "check", "findings": listed}
    return json.dumps(document | ({"unjudged": unjudged} if unjudged else {}), indent=2)


def _text(found: list[Finding], unjudged: Mapping[str, str]) -> str:
    mistakes = [finding for finding in found if not finding.is_note]
    notes = [f"Note: {finding.sentence}" for finding in found if finding.is_note]
    verdict = ["These values cannot work:"] if mistakes else ["These values are right."]
    open_questions = [
        f"Not judged by vLLM: {path}.extraArgs; add --vllm {version}=FOLDER with the vLLM of {path}.image.vllm"
        for path, version in unjudged.items()
    ]
    return "\n".join([*verdict, *(f"- {finding.sentence}" for finding in mistakes), *notes, *open_questions])
