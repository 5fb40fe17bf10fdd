# The trainer and its engines for NVIDIA GPUs: docker build -f docker/trainer.cuda.Dockerfile -t rstar-train:cuda .
# It has not been built or run yet.
#
# BASE contains CUDA, PyTorch and vLLM, which are built for each other. The trainer has an environment of its own on top,
# which shares their torch and has its own transformers, since vLLM uses another version.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0
FROM ${BASE}
COPY pyproject.toml README.md LICENSE /src/
COPY requirements /src/requirements
COPY sandbox /src/sandbox
COPY trainer /src/trainer
COPY configs /opt/configs
COPY examples /opt/lib/examples
# If pip needs a configuration to reach an index, pass it as a secret (--secret id=pip,src=FILE): it stays out of the image.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -c 'import torch; assert torch.version.cuda, "BASE has no torch for CUDA"' \
    && python3 -m venv --system-site-packages /opt/rstar \
    && /opt/rstar/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        --requirement /src/requirements/train.txt \
    && /opt/rstar/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /src \
    && /opt/rstar/bin/rstar-sandbox runtime --path /opt/runtime \
    && /opt/rstar/bin/python -c 'import trl, torch; assert torch.version.cuda'
# Engines run in BASE's own Python.
ENV PATH=/opt/rstar/bin:${PATH} \
    PYTHONPATH=/opt/lib \
    RSTAR_RUNTIME=/opt/runtime \
    RSTAR_TRAIN_ENGINES__VLLM_PYTHON=/usr/bin/python3
WORKDIR /runs
ENTRYPOINT ["rstar-train"]
CMD ["--help"]
