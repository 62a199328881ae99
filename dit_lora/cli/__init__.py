"""The `dit-lora` command: one file per verb."""

import sys

from dit_lora.errors import report_errors_and_exit


def main() -> None:
    """Run the console script: errors, and Ctrl-C during the imports, are one line and an exit code."""
    with report_errors_and_exit():
        # Inside, so that Ctrl-C during these imports shows no traceback.
        from dit_lora.cli.app import app
        from dit_lora.cli.json_output import divert_exit_output

        try:
            app()
        finally:
            # Also after an error: libraries print at exit in any case.
            if "--json" in sys.argv[1:]:
                divert_exit_output()
