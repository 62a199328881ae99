"""Tokens of every kind that `dit_lora.redact` knows, absolute paths in every form, and what must not be found again.

None of them was ever issued: a kind's own beginning, put together here, and letters drawn by a seed.
"""

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.plugins.base import BasePlugin

_LOWER, _HEX = string.ascii_lowercase + string.digits, "0123456789abcdef"
_MIXED = string.ascii_letters + string.digits
REVISION = "9f8e7d6c5b4a39281706f5e4d3c2b1a098765432"
"""A commit, which has to stay."""


_draws = random.Random(18)
DRAWN: list[str] = []
"""What is secret in `TOKENS`."""


def _drawn(length: int, letters: str = _MIXED) -> str:
    DRAWN.append("".join(_draws.choice(letters) for _ in range(length)))
    return DRAWN[-1]


TOKENS: dict[str, str] = {
    "Hugging Face": "hf_" + _drawn(34),
    "Hugging Face, lower case": "hf_" + _drawn(34, string.ascii_lowercase),
    "Hugging Face by OAuth": "hf_oauth_eyJ" + _drawn(30) + "." + _drawn(40),
    "Hugging Face of an organisation": "api_org_" + _drawn(34),
    "OpenAI": "sk-" + _drawn(20) + "T3BlbkFJ" + _drawn(20),
    "OpenAI of a project": "sk-proj-" + _drawn(60) + "-" + _drawn(20),
    "Anthropic": "sk-ant-api03-" + _drawn(93),
    "GitHub": "ghp_" + _drawn(36),
    "GitHub OAuth": "gho_" + _drawn(36),
    "GitHub refresh": "ghr_" + _drawn(36),
    "GitHub server": "ghs_" + _drawn(36),
    "GitHub fine-grained": "github_pat_" + _drawn(22) + "_" + _drawn(59),
    "GitLab": "glpat-" + _drawn(20),
    "W&B in the environment": "WANDB_API_KEY=" + _drawn(40, _HEX),
    "W&B in YAML": "api_key: " + _drawn(40, _HEX),
    "W&B by login": "wandb login " + _drawn(40, _HEX),
    "W&B, new": "wandb_v1_" + _drawn(77),
    "AWS id": "AKIA" + _drawn(16, string.ascii_uppercase + string.digits),
    "AWS secret": "aws_secret_access_key = '" + _drawn(40, _MIXED + "/+") + "'",
    "Google": "AIza" + _drawn(35),
    "Google OAuth": "ya29." + _drawn(60),
    "Slack": "xoxb-" + _drawn(11, string.digits) + "-" + _drawn(24),
    "Slack's hook": "https://hooks.slack.com/services/T" + _drawn(8) + "/B" + _drawn(8) + "/" + _drawn(24),
    "Stripe": "sk_live_" + _drawn(24),
    "npm": "//registry.npmjs.org/:_authToken=npm_" + _drawn(36),
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + _drawn(80),
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTYifQ." + _drawn(43),
    "private key": "-----BEGIN RSA PRIVATE KEY-----\n" + _drawn(64) + "\n-----END RSA PRIVATE KEY-----",
    "SSH's private key": "-----BEGIN OPENSSH PRIVATE KEY----- " + _drawn(64),
    "user in an address": "https://erika:" + _drawn(12) + "@example.org/clips",
    "database's address": "postgres://" + _drawn(8) + ":" + _drawn(12) + "@db/train",
    "signed address": "https://example.org/a.mp4?X-Amz-Signature=" + _drawn(64, _HEX),
    "Bearer": "Authorization: Bearer " + _drawn(40),
    "Basic": "Authorization: Basic " + _drawn(24) + "==",
    "Azure's storage": "AccountKey=" + _drawn(86) + "==",
    "Azure's client": _drawn(3) + "8Q~" + _drawn(34),
    "SendGrid": "SG." + _drawn(22) + "." + _drawn(43),
    "Twilio": "SK" + _drawn(32, _HEX),
    "Telegram": _drawn(9, "123456789") + ":AA" + _drawn(33),
    "Discord": "M" + _drawn(23) + "." + _drawn(6) + "." + _drawn(27),
    "Mailgun": "key-" + _drawn(32, _LOWER),
    "Mailchimp": _drawn(32, _HEX) + "-us12",
    "Square": "sq0csp-" + _drawn(43),
    "Artifactory": "AKC" + _drawn(12),
    "Databricks": "dapi" + _drawn(32, _HEX),
    "DigitalOcean": "dop_v1_" + _drawn(64, _HEX),
    "NVIDIA": "nvapi-" + _drawn(64),
    "Replicate": "r8_" + _drawn(37),
    "Vault": "hvs." + _drawn(24),
    "IBM": "ibm_cloud_iam_api_key: " + _drawn(44),
    "password": 'password: "' + _drawn(12) + '"',
    "password of a command": "--password " + _drawn(12),
}
"""By issuer; some only as the text around them says that they are one."""

PATHS: dict[str, str] = {
    "POSIX": "/home/erika/clips/a.mp4",
    "space": "/home/Erika Mann/my clips/a.mp4",
    "macOS": "/Users/erika/clips/a.mp4",
    "tilde": "~/erika/clips/a.mp4",
    "another's home": "~erika/clips/a.mp4",
    "file address": "file:///home/erika/clips/a.mp4",
    "file address with a host": "file://erika/home/clips/a.mp4",
    "drive": r"C:\Users\erika\clips\a.mp4",
    "drive, slashes": "C:/Users/erika/clips/a.mp4",
    "drive in lower case": "x:/home/erika/clips/a.mp4",
    "drive, escaped": r"C:\\Users\\erika\\clips\\a.mp4",
    "UNC": r"\\server\erika\clips\a.mp4",
    "long UNC": r"\\?\C:\Users\erika\a.mp4",
    "host": "server:/home/erika/clips/a.mp4",
    "SSH": "ssh://server/home/erika/a.mp4",
    "quoted": "open('/home/erika/my clips/a b.mp4')",
    "option": "--data=/home/erika/clips",
    "compiler's option": "-I/home/erika/include/a.h",
    "home alone": "/home/erika",
    "home with a slash": "/Users/erika/",
    "mount": "/mnt/erika/clips/a.mp4",
}
"""By form; what may be seen of none is `erika`, in any case of letters."""


def found_in(data: bytes) -> list[str]:
    """What of the seeds, or by the patterns of detect-secrets, is in published bytes.

    Its detectors of high entropy are left out, as they take digests for secrets, and the one of IP addresses, which
    takes versions for them.
    """
    text = data.decode("utf-8", errors="replace")
    secrets = [secret for secret in DRAWN if len(secret) >= 8 and secret in text]
    secrets += ["a path"] if "erika" in text.lower() else []
    # In the bytes of a tensor or video, and of one that is embedded, there may be anything.
    text = "" if "\0" in text else re.sub(r"data:\w+/\w+;base64,[\w+/=]+", "", text)
    return secrets + list(_by_pattern(text))


def _by_pattern(text: str) -> Iterator[str]:
    detectors = [
        kind()
        for kind in get_mapping_from_secret_type_to_class().values()
        if "Entropy" not in kind.__name__ and kind.__name__ != "IPPublicDetector"
    ]
    assert len(detectors) >= 20
    for number, line in enumerate(text.splitlines(), 1):
        for detector in detectors:
            yield from _secrets(detector, line, number)


def _secrets(detector: BasePlugin, line: str, number: int) -> Iterator[str]:
    for secret in detector.analyze_line(str(Path("published.yaml")), line, number):
        if secret.secret_value and not secret.secret_value.startswith("["):
            yield f"{secret.type}, line {number}: {line[:80]}"
