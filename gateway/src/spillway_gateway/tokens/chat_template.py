"""Chat templates, rendered as transformers renders them from the variables that vLLM passes.

Source of the behaviour: transformers' chat templates (a sandboxed jinja2 environment with trim_blocks, lstrip_blocks,
loop controls, a plain `tojson`, `raise_exception` and `strftime_now`) and vLLM 0.23's normalisation of messages before
it. What cannot be reproduced exactly raises CannotRender, and the caller matches by text blocks instead: keys of a
prompt that differs in one token match no block after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

ARGUMENTS_CHARS_MAX = 65_536  # shorter texts are parsed without an estimate of the cost


class CannotRender(Exception):
    """Error: this request's prompt cannot be reproduced here."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; for a prompt only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox with its parent's strictness and results. The two lookups that templates do for each message skip the
    parent's checks, which both pass and which take longer than the rest of the rendering."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is LoopContext and attribute in _LOOP_NUMBERS:
            try:
                return getattr(obj, attribute)
            except AttributeError:  # of an iterator that is asked for its next item
                return self.undefined(obj=obj, name=attribute)
        if kind is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)


_LOOP_NUMBERS = frozenset({"depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"})
_DICT_ATTRIBUTES = frozenset(dir(dict))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's filter escapes HTML; models are not trained on that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template. special_tokens: bos_token and the like, as templates name them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._wants_parts = _loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise CannotRender(f"the chat template does not compile: {error}") from error
        # Each rendering copies them, and jinja2's ChainMap is slow to copy.
        self._template.globals = dict(self._template.globals)
        self._has_developer_role = "'developer'" in source or '"developer"' in source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. Raises CannotRender if the engine would refuse it or it holds more than text."""
        plain = not self._wants_parts
        conversation = [message if plain and _is_plain(message) else self._normalised(message) for message in messages]
        try:
            # Template.render() without its copy of the variables and its rewriting of tracebacks.
            context = self._template.new_context(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": conversation,
                    "tools": [_normalised_tool(tool) for tool in tools] if tools is not None else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
            return "".join(self._template.root_render_func(context))
        except Exception as error:  # templates are programs and may raise anything; the engine decides on the request
            raise CannotRender(f"the chat template failed ({error.__class__.__name__})") from error

    def _normalised(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = message.get("role")
        if not isinstance(role, str):
            raise CannotRender("a message has no role")
        if role == "developer" and not self._has_developer_role:
            raise CannotRender("the template has no developer role")
        content: object = message.get("content")
        if self._wants_parts and role != "tool":
            content = [{"type": "text", "text": text} for text in _texts(content)]
        elif not isinstance(content, str):
            content = "\n".join(_texts(content))
        result: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            calls = _tool_calls(message.get("tool_calls"))
            if calls:
                result["tool_calls"] = calls
            reasoning = message.get("reasoning")
            if reasoning is not None:
                result["reasoning"] = result["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            result["name"] = message["name"]
        return result


_PLAIN_ROLES = ("user", "assistant")
_PLAIN_MEMBERS = ("role", "content")  # in this order, as templates may write out whole messages


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether the message needs no normalisation, like most."""
    return tuple(message) == _PLAIN_MEMBERS and isinstance(message["content"], str) and message["role"] in _PLAIN_ROLES


def _texts(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise CannotRender("content is neither text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise CannotRender("content holds parts other than text")
    return texts


def _tool_calls(raw: object) -> list[Any]:
    if not isinstance(raw, list):
        return []
    calls = []
    for call in raw:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise CannotRender("a tool call has no function")
        arguments = function.get("arguments")
        new: object = arguments or {}
        if isinstance(arguments, str) and arguments:
            costly = _costly(arguments)
            try:
                parsed = json.loads(arguments[:ARGUMENTS_CHARS_MAX] if costly else arguments)
            except ValueError as error:
                raise CannotRender("a tool call's arguments are not JSON, or much of it") from error
            new = {} if parsed is None else parsed
        calls.append({**call, "function": {**function, "arguments": new}})
    return calls


def _costly(arguments: str) -> bool:
    """Whether parsing the text would hold the interpreter's lock for more than 20 ms, at 0.5 us for each value and
    10 ns for each character."""
    if len(arguments) <= ARGUMENTS_CHARS_MAX:
        return False
    values = sum(map(arguments.count, ("[", "{", ",")))
    return values * 0.5e-6 + len(arguments) * 10e-9 > 0.020


def _normalised_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM parses tools into models and dumps them again: fixed order first, absent fields as null."""
    function = tool.get("function")
    if not isinstance(function, dict) or "name" not in function:
        raise CannotRender("a tool has no named function")
    optional = {key: function.get(key) for key in ("description", "parameters")}
    known = {"name": function["name"], **optional}
    dumped = {**known, **{key: value for key, value in function.items() if key not in known}}
    rest = {key: value for key, value in tool.items() if key not in ("type", "function")}
    return {"type": tool.get("type", "function"), "function": dumped, **rest}


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template walks the parts of a message; vLLM then hands it parts, and one string otherwise."""
    messages = _aliases(tree, {"messages"})
    message_names = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _root_name(loop.iter) in messages
    }
    message_names = _aliases(tree, message_names)
    for loop in tree.find_all(nodes.For):
        target = _unwrapped(loop.iter)
        if isinstance(target, nodes.Name) and target.name == "content":
            return True
        if isinstance(target, nodes.Getitem) and isinstance(target.arg, nodes.Const):
            key: object = target.arg.value
        elif isinstance(target, nodes.Getattr):
            key = target.attr
        else:
            continue
        if key == "content" and _root_name(target.node) in message_names:
            return True
    return False


def _aliases(tree: nodes.Template, names: set[str]) -> set[str]:
    """Return the names and all names that are assigned from them."""
    found = set(names)
    grown = True
    while grown:
        grown = False
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in found and _root_name(assign.node) in found:
                found.add(target.name)
                grown = True
    return found


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """Return the node without filters, tests and slices around it."""
    while True:
        if isinstance(node, (nodes.Filter, nodes.Test)) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _root_name(node: nodes.Node | None) -> str | None:
    inner = _unwrapped(node)
    return inner.name if isinstance(inner, nodes.Name) else None
