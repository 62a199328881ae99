"""Run `dit-lora` as a module, so that `accelerate launch -m dit_lora ...` can start several processes."""

from dit_lora.cli import main

if __name__ == "__main__":
    main()
