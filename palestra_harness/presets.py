"""The coding agents that were tried, each with its version; `NAME-lean` has few tools, for small contexts."""

from __future__ import annotations

from dataclasses import replace

from palestra_harness.harness import Harness

CLAUDE_CODE = Harness(
    name="claude-code",
    tried="2.1.197",
    install="npm install -g @anthropic-ai/claude-code@2.1.197",
    command=(
        *("claude", "-p", "{task}", "--dangerously-skip-permissions"),
        *("--output-format", "json", "--no-session-persistence"),
    ),
    variables={
        "ANTHROPIC_BASE_URL": "{anthropic_url}",
        "ANTHROPIC_API_KEY": "{api_key}",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{max_tokens}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",  # so that it runs as root without asking
    }
    | dict.fromkeys(
        (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "CLAUDE_CODE_SUBAGENT_MODEL",
        ),
        "{model}",
    ),
)
CLAUDE_CODE_LEAN = replace(
    CLAUDE_CODE,
    name="claude-code-lean",
    command=(*CLAUDE_CODE.command, "--bare", "--tools", "Bash,Read,Edit,Write"),
)

CODEX = Harness(
    name="codex",
    tried="0.171.0",
    install="npm install -g @openai/codex@0.171.0",
    command=("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "{task}"),
    variables={"CODEX_HOME": "{home}/codex", "PALESTRA_EPISODE_KEY": "{api_key}"},
    files={
        "codex/config.toml": """model = "{model}"
model_provider = "palestra"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.palestra]
name = "palestra"
base_url = "{base_url}"
env_key = "PALESTRA_EPISODE_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    },
)

_SYSTEM = "You are a coding agent. Solve the task with the tools, and say what you did."
_LEAN_CODEX = """model_instructions_file = "{home}/codex/instructions.md"
model_reasoning_summary = "none"
web_search = "disabled"
include_apps_instructions = false
include_environment_context = false
include_permissions_instructions = false
include_skill_instructions = false
"""
CODEX_LEAN = replace(
    CODEX,
    name="codex-lean",
    command=(
        *CODEX.command[:-1],
        *(word for feature in ("apps", "goals", "multi_agent", "plugins") for word in ("--disable", feature)),
        CODEX.command[-1],
    ),
    files={
        "codex/config.toml": _LEAN_CODEX + CODEX.files["codex/config.toml"],
        "codex/instructions.md": _SYSTEM,
    },
)

_OPENCODE = """{"$schema": "https://opencode.ai/config.json", "autoupdate": false, "share": "disabled",
 "model": "palestra/{model}", "small_model": "palestra/{model}",
 "provider": {"palestra": {"npm": "@ai-sdk/openai-compatible", "name": "palestra",
  "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
  "models": {"{model}": {"name": "policy", "tool_call": true,
   "limit": {"context": {max_context}, "output": {max_tokens}}}}}},
 "permission": {"edit": "allow", "bash": "allow"}}"""
OPENCODE = Harness(
    name="opencode",
    tried="1.18.33",
    install="npm install -g opencode-ai@1.18.33",
    command=("opencode", "run", "{task}"),
    variables={
        "OPENCODE_CONFIG_CONTENT": _OPENCODE,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    },
)
OPENCODE_LEAN = replace(
    OPENCODE,
    name="opencode-lean",
    command=("opencode", "run", "--pure", "--title", "task", "--agent", "build", "{task}"),
    variables={
        **OPENCODE.variables,
        "OPENCODE_CONFIG_CONTENT": _OPENCODE[:-1]
        + f""",
 "agent": {{"build": {{"prompt": "{_SYSTEM}", "tools": {{"task": false, "todowrite": false, "webfetch": false,
  "skill": false, "glob": false, "grep": false}}}}}}}}""",
    },
)

_PI = """{"providers": {"palestra": {"baseUrl": "{base_url}", "apiKey": "PALESTRA_EPISODE_KEY",
 "api": "openai-completions", "models": [{"id": "{model}", "name": "policy", "reasoning": false, "input": ["text"],
  "contextWindow": {max_context}, "maxTokens": {max_tokens},
  "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}}"""
PI = Harness(
    name="pi",
    tried="0.73.1",
    install="npm install -g @mariozechner/pi-coding-agent@0.73.1",
    command=("pi", "-p", "--no-session", "--offline", "--provider", "palestra", "--model", "{model}", "{task}"),
    variables={
        "PI_CODING_AGENT_DIR": "{home}/pi",
        "PALESTRA_EPISODE_KEY": "{api_key}",
        "PI_OFFLINE": "1",
        "PI_TELEMETRY": "0",
    },
    files={"pi/models.json": _PI},
)

QWEN_CODE = Harness(
    name="qwen-code",
    tried="0.15.10",
    install="npm install -g @qwen-code/qwen-code@0.15.10",
    command=("qwen", "--auth-type", "openai", "--yolo", "-p", "{task}"),
    variables={
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_KEY": "{api_key}",
        "OPENAI_MODEL": "{model}",
        "QWEN_TELEMETRY_ENABLED": "false",
    },
    files={
        ".qwen/settings.json": """{"general": {"disableAutoUpdate": true, "enableAutoUpdate": false},
 "privacy": {"usageStatisticsEnabled": false}, "telemetry": {"enabled": false}}"""
    },
)
QWEN_CODE_LEAN = replace(
    QWEN_CODE,
    name="qwen-code-lean",
    command=("qwen", "--auth-type", "openai", "--yolo", "--bare", "--system-prompt", _SYSTEM, "-p", "{task}"),
)

_CALL = """<tool_call>
{"name": "bash", "arguments": {"command": "%s"}}
</tool_call>"""
MINI_SWE_AGENT = Harness(
    name="mini-swe-agent",
    tried="2.4.6",
    install="pip install mini-swe-agent==2.4.6",
    command=(
        *("mini", "-m", "openai/{model}", "-t", "{task}", "-y", "--exit-immediately"),
        *("-o", "{home}/trajectory.json"),
    ),
    variables={
        "OPENAI_API_KEY": "{api_key}",
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_BASE": "{base_url}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    script=(
        "I write the file.\n" + _CALL % "echo palestra > palestra.txt",
        "Done.\n" + _CALL % "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ),
)

AIDER = Harness(
    name="aider",
    tried="0.86.2",
    install="pip install aider-chat==0.86.2",
    command=(
        *("aider", "--model", "openai/{model}", "--weak-model", "openai/{model}", "--message", "{task}"),
        *("--yes-always", "--no-check-update", "--no-analytics", "--no-show-release-notes"),
        *("--no-show-model-warnings", "--no-auto-commits", "--no-gitignore", "--edit-format", "diff"),
    ),
    variables={
        "OPENAI_API_KEY": "{api_key}",
        "OPENAI_API_BASE": "{base_url}",
        "AIDER_ANALYTICS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    script=("palestra.txt\n```\n<<<<<<< SEARCH\n=======\npalestra\n>>>>>>> REPLACE\n```\n",),
)

OPENHANDS = Harness(
    name="openhands",
    tried="1.16.0",
    install="pip install openhands==1.16.0",  # needs Python 3.12
    command=("openhands", "--headless", "--always-approve", "--override-with-envs", "-t", "{task}"),
    variables={
        "LLM_API_KEY": "{api_key}",
        "LLM_BASE_URL": "{base_url}",
        "LLM_MODEL": "openai/{model}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
    },
)
