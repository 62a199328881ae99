"""Remove tokens and absolute paths from texts that others may read, and leave everything else unchanged.

Everything that may leave the machine goes through it: bundles, model cards and files published with them, reports,
trackers. The last part of a path is kept. A token becomes `[token]`, and a home folder `[home]`. Hex digits count as a
key only if a word before them says so: the 40 digits of a commit and the 64 of a digest stay.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TOKEN, HOME = "[token]", "[home]"

TEXT_KEYS = frozenset(
    {"answer", "caption", "caption_prefix", "chat_template", "classes", "id2label", "prompt", "prompts", "system"}
)
"""Keys whose values are texts for or from a model, in which a slash is rarely a path."""

TOKEN_PATTERNS: Mapping[str, str] = {
    # OAuth tokens have parts in base64url, separated with dots.
    "Hugging Face": r"hf_(?:oauth|jwt|app)_[\w=-]{10,}(?:\.[\w=-]+)*|(?:hf|api_org)_[A-Za-z0-9]{10,}",
    "Weights & Biases": r"wandb_v\d+_\w{8,}|local-[0-9a-f]{40}",
    "OpenAI, Anthropic and others": r"sk-(?:[A-Za-z]{1,12}\d{0,3}-){0,3}(?:(?=\w*\d)\w{8,}|[A-Za-z0-9]{20,})[\w-]*",
    "GitHub": r"gh[opusr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}",
    "GitLab": r"(?:gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct)-|GR1348941)[\w-]{10,}",
    # Together with a secret after it, as in two lines of a credentials file or a row of a table.
    "AWS": r"(?:A3T[A-Z0-9]|A[BCGIKNRS][A-Z]A)[A-Z0-9]{16}(?:[\s,:;/|]{1,3}[\w+/]{40}(?![\w+/=]))?",
    "Google": r"AIza[\w-]{20,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|1//0[\w-]{20,}",
    "Slack": r"xox[a-z](?:\.xox[a-z])?-[\w-]{8,}|xapp-\d-[\w-]{8,}|hooks\.slack\.com/\w+/[\w/+-]+",
    "Stripe": r"[rsp]k_(?:live|test)_[A-Za-z0-9]{8,}|whsec_[\w+/=]{16,}",
    "npm": r"npm_[A-Za-z0-9]{20,}",
    "PyPI": r"pypi-A[\w-]{15,}",
    "JWT": r"eyJ[\w=-]{8,}(?:\.[\w=-]+)*",
    "private key": (
        r"-{0,5}BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[\s\S]*?(?:END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-{0,5}|\Z)"
    ),
    "PuTTY": r"PuTTY-User-Key-File-\d[\s\S]*",
    "age": r"AGE-SECRET-KEY-1[0-9A-Z]{40,}",
    "SendGrid": r"SG\.[\w-]{16,}\.[\w-]{16,}",
    "Twilio": r"(?:AC|SK)[0-9a-z]{32}(?![0-9a-z])",
    "Telegram": r"\d{8,10}:[\w-]{35}(?![\w-])",
    "Discord": r"[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}|discord(?:app)?\.com/api/webhooks/[\w/-]+",
    "Mailgun": r"(?:pub)?key-[0-9a-z]{32}(?![0-9a-z])",
    "Mailchimp": r"[0-9a-f]{32}-us\d{1,2}",
    "Square": r"sq0[a-z]{3}-[\w-]{20,}|EAAA[\w-]{56,}",
    "Azure": r"[\w~.-]{3}[78]Q~[\w~.-]{31,34}",
    "DigitalOcean": r"do[opr]_v1_[0-9a-f]{32,}",
    "Shopify": r"shp(?:at|ca|pa|ss|rt)_[0-9A-Fa-f]{32}",
    "Databricks": r"dapi[0-9a-f]{32}(?:-\d)?",
    "Vault": r"hv[brs]\.[\w-]{20,}",
    "Terraform": r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,}",
    "Groq": r"gsk_[A-Za-z0-9]{20,}",
    "xAI": r"xai-[A-Za-z0-9]{20,}",
    "Perplexity": r"pplx-[A-Za-z0-9]{20,}",
    "Replicate": r"r8_[A-Za-z0-9]{20,}",
    "NVIDIA": r"nvapi-[\w-]{20,}",
    "LangSmith": r"lsv2_(?:pt|sk)_[0-9a-f]{32}_\w+",
    "Kaggle": r"KGAT_[0-9a-f]{32}",
    "Linear": r"lin_(?:api|oauth)_[A-Za-z0-9]{20,}",
    "Notion": r"(?:secret|ntn)_[A-Za-z0-9]{30,}",
    "Postman": r"PMAK-[\w-]{20,}",
    "New Relic": r"NR(?:AK|JS|II|RA)-[\w-]{16,}",
    "Grafana": r"gl(?:sa|c)_[\w+/=-]{20,}",
    "Docker": r"dckr_(?:pat|oat)_[\w-]{16,}",
    "RubyGems": r"rubygems_[0-9a-f]{32,}",
    "crates.io": r"cio[A-Za-z0-9]{32}(?![A-Za-z0-9])",
    "Artifactory": r"AKC[A-Za-z0-9]{10,}|AP[\dA-F](?=[A-Za-z]*\d)[A-Za-z0-9]{8,}",
    "Sentry": r"sntry[su]_[\w+/=-]{20,}",
    "Atlassian": r"AT[AC]TT3[\w=-]{20,}",
    "Facebook": r"EAACEdEose0cBA[A-Za-z0-9]+",
    "Doppler": r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9]{20,}",
    "Pulumi": r"pul-[0-9a-f]{40}",
    "Supabase": r"sbp_[0-9a-f]{40}",
    "PlanetScale": r"pscale_(?:tkn|pw|oauth)_[\w=.-]{20,}",
    "Figma": r"fig[dou]_[\w-]{20,}",
    "Dropbox": r"sl\.(?:u\.)?[\w-]{60,}",
    "Heroku": r"HRKU-[\w-]{20,}",
    "Fly": r"fm[12][ar]?_[\w+/=-]{20,}",
    "SoftLayer": r"api\.softlayer\.com/soap/v3(?:\.1)?/[a-z0-9]{64}",
}
"""Tokens with a recognizable format: a regular expression by issuer."""

_ISSUED_TOKEN = re.compile("(?<![A-Za-z0-9])(?:" + "|".join(TOKEN_PATTERNS.values()) + ")")

# Names of secrets. `secret` and `token` are also words of prose, so their value must look like a secret.
_SECRET_PREFIX = (
    "access|account|api|app|auth|client|consumer|database|db|deploy|encryption|key|master|priv|private|secret|"
    "service|shared[ _-]?access|signing|storage|subscription|wandb|signature"
)
# A name that always means a secret, such as api_key, client-secret, password or pwd, with an optional suffix.
_SECRET_NAME = (
    rf"(?:(?:{_SECRET_PREFIX})[ _-]?(?:key|secret|pass|token)|passw(?:or)?d|passphrase|contrase[nñ]a|"
    r"(?<![a-z])pwd)[\w-]{0,40}"
)
# `token: 5` may be prose. Not after `[`, where the word is this module's own replacement.
_AMBIGUOUS_NAME = r"(?<!\[)(?:secret|token|credential)s?(?:[_-]\w{1,40})?"
# The end of a quoted or bracketed name, then an assignment or a comparison.
_ASSIGNMENT = r"""["'`\]]{0,2}\s{0,3}(?::=|=>|!=|={1,3}|:)\s{0,3}"""
# A text in quotes or backticks, or everything up to a space or separator.
_VALUE = r"""(?:"[^"\n]+"|'[^'\n]+'|`[^`\n]+`|[^\s"'`,;&|<>(){}]+)"""
# At least 12 characters without spaces, with a digit and a letter.
_SECRET_LIKE_VALUE = r"""["'`]?(?=[\w+/=~.-]*\d)(?=[\d+/=~.-]*[A-Za-z])[\w+/=~-]{12,}[\w+/=~.-]*["'`]?"""
_NAMED_SECRETS = tuple(
    re.compile(rf"(?P<name>{name})(?!\[token\]){value}", re.IGNORECASE)
    for name, value in (
        (r"[a-z][\w+.-]{0,20}://", r"[^\s/?#\"'<>`]+(?=@)"),  # user and password in a URL
        (
            # A parameter in the query of a URL.
            r"[?&;][\w.-]{0,40}(?:token|sig|signature|key|secret|credential|auth|pass(?:word)?|code)=",
            r"[^\s&\"'<>`]+",
        ),
        # Headers of HTTP requests, of which the whole value is removed.
        (r"authorization[\"']?\s*[:=]\s*[\"']?", r"(?!\s)[^\"'\n]+"),
        (r"cookie[\"']?\s*[:=]\s*[\"']?(?=[^\s=]+=)", r"[^\"'\n]+"),
        (r"\bbearer\s+", r"(?:(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}|[\w.~+/=-]{20,})"),
        # An option of a command, such as --hf-token VALUE.
        (r"(?<![\w-])--?(?:[a-z]{1,40}-)?(?:api-?key|token|password|secret)[ =]", r"(?!-)\S+"),
        # An assignment to a secret's name: any value. In a sentence with `is`, the value must have a digit.
        (_SECRET_NAME + _ASSIGNMENT, _VALUE),
        (_SECRET_NAME + r"\s+is\s+", r"(?=\S*\d)[^\s,;]{4,}"),
        # An assignment to an ambiguous name: only a value that looks like a secret.
        (_AMBIGUOUS_NAME + _ASSIGNMENT, _SECRET_LIKE_VALUE),
        (r"\b(?:password|passwd|login)\s+", r"(?=\S*\d)(?=\S*[a-z])[^\s,;]{8,}"),
        # A key of 40 hex digits, as Weights & Biases has them; a cache key or digest is none.
        (r"(?<!cache )(?<!digest )\b(?:wandb|key)\W{1,4}", r"[0-9a-f]{40}\b"),
    )
)
# An environment variable with such a name in upper case: any value is a secret.
_VARIABLE_ASSIGNMENT = re.compile(
    r"(?P<name>\b[A-Z][A-Z0-9_]*_(?:KEY|TOKEN|SECRET|PASSWORD|PASS|PAT|AUTH|CREDENTIALS)=)"
    rf"(?!\[token\]){_VALUE}"
)
# Shorter texts cannot hold a secret.
_MIN_CHARACTERS = 6
_SECRET_HINT = re.compile(r"[:=]|key|passw|login|wandb|bearer|secret|token|pwd", re.IGNORECASE)
"""Every pattern of `_NAMED_SECRETS` and `_VARIABLE_ASSIGNMENT` needs one of these: texts without them are not
searched.
"""
_SECRET_KEY = re.compile(rf"(?:[\w-]*{_SECRET_NAME}|authorization|cookie)", re.IGNORECASE)
_AMBIGUOUS_KEY = re.compile(rf"[\w-]*{_AMBIGUOUS_NAME}", re.IGNORECASE)
# As the value of an ambiguous name, but the whole text.
_SECRET_SHAPE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=~.-]{12,}")
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASS|PAT|AUTH|CREDENTIALS?)$")

# A folder's name may have spaces, unless a file name with an extension ends before the space.
_NOT_IN_NAMES = r"\s/\\:;,'\"`()<>|"
# Extensions have two to five characters.
_NO_EXTENSION_BEFORE = "".join(rf"(?<!\.\w{{{length}}})" for length in (2, 3, 4, 5))
# One folder with its slashes; at most four words.
_FOLDER = rf"[^{_NOT_IN_NAMES}]+(?:{_NO_EXTENSION_BEFORE} [^{_NOT_IN_NAMES}]+){{0,3}}[/\\]+"
# The last part of a path, with slashes if it is a folder.
_LAST_PART = rf"[^{_NOT_IN_NAMES}]+[/\\]*"
# C:\ or C:/, also after slashes as in file:///C:/.
_DRIVE = r"(?<![A-Za-z0-9])/{0,3}[A-Za-z]:[/\\]+"
# \\server\share, and Windows' long form \\?\C:\.
_UNC = r"(?<!\\)\\{2,}(?:[?.]\\+(?:[A-Za-z]:\\+)?)?(?=[^\s\\]+\\)"
# ~/ or ~name/.
_USER = r"(?<![\w.~/\\])~(?:[A-Za-z_][\w.-]*)?[/\\]+"
# Directly after a compiler's option, as in -I/usr/include.
_OPTION = r"(?<=[\s'\"=]-[A-Z])|(?<=^-[A-Z])"
# A slash that does not continue a word, a number, a URL or a closing bracket.
_POSIX = rf"(?:(?<![\w.~/)\]}}])|{_OPTION})/+"
_ROOT_FOLDERS = (
    "home|users|root|mnt|media|tmp|var|opt|etc|srv|usr|proc|private|volumes|scratch|gpfs|lustre|nfs|data|datasets|"
    "workspaces?|work|content|kaggle|storage|export|net|mount|cluster|app|build|library|applications|dev|run"
)
# A slash before a usual top folder: certainly a path, also in prose.
_KNOWN_ROOT = rf"(?:(?<![A-Za-z0-9_.~/)\]}}])|{_OPTION})/+(?=(?:{_ROOT_FOLDERS})/)"
# scheme://host..., but not file:///..., whose host is empty.
_URL = r"(?P<address>(?<![A-Za-z0-9])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{1,20})://(?=[^\s/])[^\s\"'<>`]*)"
_LOCAL_SCHEMES = frozenset({"file", "smb", "nfs", "afp", "cifs", "sftp", "ssh", "scp", "rsync", "vscode-remote"})
"""URL schemes that stand for paths on a machine."""


def _compile_path_pattern(posix: str, parts: str) -> re.Pattern[str]:
    """Compile a regular expression for URLs, which are mostly kept, and absolute paths.

    `posix` matches the start of a POSIX path, and `parts` the rest.
    """
    certain = rf"(?:{_DRIVE}|{_UNC}|{_USER}|{_KNOWN_ROOT})(?:{_FOLDER})*{_LAST_PART}"
    full_path = rf"(?:{_DRIVE}|{_UNC}|{_USER}|{posix})[^\s\"'`:;,|<>][^\"'`\n:;,|<>]*"
    quoted = rf"(?P<quote>[\"'`])(?P<inside>{full_path})(?P=quote)"
    return re.compile(rf"{_URL}|{quoted}|{certain}|{posix}(?:{_FOLDER}){parts}{_LAST_PART}", re.IGNORECASE)


_TEXT_PATHS = _compile_path_pattern(_POSIX, "+")
_PROSE_PATHS = _compile_path_pattern(_KNOWN_ROOT, "*")
_WHOLE_PATH = re.compile(
    rf"(?:{_DRIVE}|{_UNC}|{_USER}|/+)[^\s/\\](?:(?!\s(?:/|~|[A-Za-z]:[/\\]|\\\\))[^\"'`\n:;,|<>])*"
)


def redact_value(value: Any) -> Any:
    """Copy a value with tokens and absolute paths removed from all strings in it, including keys of mappings.

    Values whose key names a secret are removed in any case. Values of keys in `TEXT_KEYS` are handled as in
    `redact_model_text`. Sequences become lists.
    """
    return make_redactor()(value)


def make_redactor() -> Callable[[Any], Any]:
    """Create a function that redacts like `redact_value`, for many values: the environment is read only once."""
    # Values that are secret because of the variable they are in, whatever their format is.
    secrets = _read_environment_secrets()
    return lambda value: _redact_nested(value, secrets, _TEXT_PATHS)


def redact_model_text(text: str) -> str:
    """Redact text written for a model: only text that is certainly a path is removed, and `/imagine` is kept."""
    return _redact_text(text, _read_environment_secrets(), _PROSE_PATHS)


def remove_tokens(text: str) -> str:
    """Replace all tokens in the text with `[token]`, including secrets in this process's environment variables."""
    return _redact_known_secrets(text, _read_environment_secrets())


def _redact_known_secrets(text: str, secrets: Sequence[str]) -> str:
    if len(text) < _MIN_CHARACTERS:
        return text
    # Longest first: replacing a shorter secret inside a longer one would leave the rest of it.
    for value in secrets:
        text = text.replace(value, TOKEN)
    # Tokens by format, then values by the name before them.
    text = _ISSUED_TOKEN.sub(TOKEN, text)
    for pattern in (*_NAMED_SECRETS, _VARIABLE_ASSIGNMENT) if _SECRET_HINT.search(text) else ():
        # Keeps the name, so that the reader sees what was removed.
        text = pattern.sub(_replace_value, text)
    return text


def _replace_value(match: re.Match[str]) -> str:
    """Replace the secret value in a match of `name=value` with `[token]`, and keep its name and quotes."""
    # The match without the name at its beginning.
    value = match[0][len(match["name"]) :]
    quote = value[0] if value[0] in "\"'`" and value[-1] == value[0] and len(value) > 1 else ""
    return f"{match['name']}{quote}{TOKEN}{quote}"


def _redact_text(text: str, secrets: Sequence[str], paths: re.Pattern[str]) -> str:
    # Tokens first: a token may contain slashes, of which a path pattern would leave a part.
    text = _redact_known_secrets(text, secrets)
    if "/" not in text and "\\" not in text:
        return text
    # The whole text is one path, which may have spaces.
    if paths is _TEXT_PATHS and _WHOLE_PATH.fullmatch(text):
        return _get_last_path_part(text)
    return paths.sub(_shorten_match, text)


def _redact_nested(value: Any, secrets: Sequence[str], paths: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return _redact_text(value, secrets, paths)
    if isinstance(value, Mapping):
        return {
            _redact_nested(key, secrets, paths): TOKEN
            # The whole value, even if it does not look like a token.
            if _is_secret(str(key), item)
            else _redact_nested(item, secrets, _PROSE_PATHS if key in TEXT_KEYS else paths)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact_nested(item, secrets, paths) for item in value]
    return value


def _is_secret(key: str, value: Any) -> bool:
    """True if a mapping's key names a secret; for `token` and similar words, the value must look like one too."""
    if not isinstance(value, str) or not value:
        return False
    # Names such as `api_key` are enough by themselves.
    named = _SECRET_KEY.fullmatch(key) is not None
    return named or bool(_AMBIGUOUS_KEY.fullmatch(key) and _SECRET_SHAPE.fullmatch(value))


def _read_environment_secrets() -> list[str]:
    """Values of environment variables that are named as secrets, longest first.

    Values under 12 characters, paths, and short values without a digit are ignored.
    """
    secrets = {
        value
        for name, value in os.environ.items()
        if _SECRET_VARIABLE.search(name.upper())
        and len(value) >= 12
        and not _WHOLE_PATH.fullmatch(value)
        and (len(value) >= 20 or any(letter.isdigit() for letter in value))
    }
    return sorted(secrets, key=len, reverse=True)


def _shorten_match(match: re.Match[str]) -> str:
    if match["address"]:
        # `file://` and similar URLs hold a path; the others, such as https, are kept.
        is_local = match["scheme"].lower() in _LOCAL_SCHEMES
        return f"{match['scheme']}:{_get_last_path_part(match['address'])}" if is_local else match["address"]
    if match["quote"]:
        return f"{match['quote']}{_get_last_path_part(match['inside'])}{match['quote']}"
    return _get_last_path_part(match[0])


def _get_last_path_part(path: str) -> str:
    """Last part of a path. A home folder becomes `[home]`, because its name is the user's."""
    # Both kinds of slashes: a text may come from another system.
    parts = [part for part in re.split(r"[/\\]+", path) if part]
    is_home = len(parts) > 1 and parts[-2].lower() in ("home", "users")
    return HOME if is_home and len(parts) <= 3 else parts[-1]
