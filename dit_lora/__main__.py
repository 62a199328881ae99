"""`python -m dit_lora` is `dit-lora`; with it, `accelerate launch -m dit_lora cache build RECIPE` starts several."""

from dit_lora.cli.app import main

if __name__ == "__main__":
    main()
