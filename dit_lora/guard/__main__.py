"""`python -m dit_lora.guard SCRIPT.py ARGS` is `dit-lora guard`, and needs torch alone."""

import argparse
from pathlib import Path

from dit_lora.config.recovery_settings import GRADIENT_CHECK_INTERVAL, LoopConfig
from dit_lora.errors import report_errors_and_exit


def main() -> None:
    """Run the script with everything after its name as its arguments."""
    default = LoopConfig()
    parser = argparse.ArgumentParser(prog="python -m dit_lora.guard", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("dit_lora_guard"))
    parser.add_argument("--max-skips", type=int, help="end the script once so many were skipped")
    parser.add_argument("--snapshot-every", type=int, default=default.snapshot_every)
    parser.add_argument("--bundles", type=int, default=default.bundles)
    parser.add_argument("--preflight", action="store_true")
    parser.add_argument("--monitor-every", type=int, default=default.monitor_every)
    parser.add_argument("--spike-threshold", type=float, default=default.spike_threshold)
    parser.add_argument(
        "--gradient-check", dest="gradient_every", action="store_const", const=GRADIENT_CHECK_INTERVAL, default=0
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with report_errors_and_exit():
        from dit_lora.guard.attach.monitoring import OPTIONAL_CHECKS
        from dit_lora.guard.attach.run_script import run_script

        settings = {name: getattr(options, name) for name in ("snapshot_every", "bundles", *OPTIONAL_CHECKS)}
        config = LoopConfig.from_script_options(options.max_skips, **settings)
        run_script(options.script, options.arguments, config=config, folder=options.folder, module=options.module)


if __name__ == "__main__":
    main()
