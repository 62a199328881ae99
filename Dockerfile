# dit-lora on NVIDIA GPUs. Build and use it:
#   docker build --tag dit-lora .
#   docker run --rm --gpus all --volume "$PWD:/work" dit-lora doctor
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Triton compiles its launchers with gcc and Python's headers. Ubuntu removes old versions, so none are pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 --shell /bin/bash trainer \
    && install --directory --owner=trainer /work

ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
COPY . /tmp/dit-lora
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint /tmp/dit-lora/constraints.txt /tmp/dit-lora \
    && rm -rf /tmp/dit-lora

# A login to the Hub is mounted (--volume ~/.cache/huggingface:/home/trainer/.cache/huggingface), never built in.
USER 10001
WORKDIR /work
ENTRYPOINT ["dit-lora"]
CMD ["--help"]
