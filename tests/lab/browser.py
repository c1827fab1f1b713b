"""A page in the browser chromium, which tells what it has made of it."""

import json
import shutil
import subprocess

import pytest

needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs the browser chromium"
)
CLOSED = "default-src 'none'"
SIZES = ("1280,900", "400,800")


def told_by(page, probe, profile):
    """The value of a probe, an expression in JavaScript, once the page is loaded, at each size.

    Args:
        page: the file, which loads nothing; what is tested is a copy that may run the probe.
        profile: a folder for the browser.
    """
    text = page.read_text()
    assert text.count(CLOSED) == 1
    text = text.replace(CLOSED, f"{CLOSED}; script-src 'unsafe-inline'")
    script = f"document.title = JSON.stringify({probe})"
    script = f'<script>addEventListener("load", () => {{ {script} }})</script>'
    probed = page.with_name("probed.html")
    probed.write_text(text.replace("</head>", f"{script}</head>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    for size in SIZES:
        options = [f"--window-size={size}", f"--user-data-dir={profile}", probed.as_uri()]
        result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        yield json.loads(result.stdout.partition("<title>")[2].partition("</title>")[0])
