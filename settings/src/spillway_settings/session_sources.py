"""Headers and members of a body in which requests name their session, in order of precedence.

Agents name their session by themselves, each in its own way:

- Claude Code: `x-claude-code-session-id`, for its sub-agents too, and the same session in `metadata.user_id` of
  Messages.
- Codex: `session-id`, in older versions `session_id`; a sub-agent's request also has `x-codex-parent-thread-id`.
- OpenCode: `x-session-id` and `x-session-affinity`; a sub-agent's request names its parent's session as
  `x-parent-session-id`.

So a parent goes before a session of one's own, and Codex' `session-id`, which its sub-agents share, before the parent
thread, which may be a sub-agent itself.
"""

from __future__ import annotations

BODY = "body:"  # before the name of a member; no header's name has a colon
PROMPT_CACHE_KEY = f"{BODY}prompt_cache_key"
METADATA_USER_ID = f"{BODY}metadata.user_id"
SESSION_SOURCES = (
    "x-parent-session-id",
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "x-codex-parent-thread-id",
    "session_id",
    "x-session-affinity",
    PROMPT_CACHE_KEY,
    METADATA_USER_ID,
)
SESSION_SOURCE_PATTERN = r"^(body:(prompt_cache_key|metadata\.user_id)|[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64})$"
