# The trainer and its engines for AMD GPUs: docker build -f docker/trainer.rocm.Dockerfile -t rstar-train:rocm .
# It has not been built or run yet; docs/mi300x.md lists what else has not been run.
#
# BASE contains ROCm, its PyTorch and vLLM, which are built for each other. The trainer has an environment of its own on
# top, which shares their torch and has its own transformers, since vLLM uses another version.
ARG BASE=docker.io/vllm/vllm-openai-rocm:v0.32.0
FROM ${BASE}
COPY pyproject.toml README.md LICENSE /src/
COPY requirements /src/requirements
COPY sandbox /src/sandbox
COPY trainer /src/trainer
COPY configs /opt/configs
COPY examples /opt/lib/examples
# If pip needs a configuration to reach an index, pass it as a secret (--secret id=pip,src=FILE): it stays out of the image.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -c 'import torch; assert torch.version.hip, "BASE has no torch for ROCm"' \
    && python3 -m venv --system-site-packages /opt/rstar \
    && /opt/rstar/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        --requirement /src/requirements/train.txt \
    && /opt/rstar/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /src \
    && /opt/rstar/bin/rstar-sandbox runtime --path /opt/runtime \
    && /opt/rstar/bin/python -c 'import trl, torch; assert torch.version.hip'
# Engines run in BASE's own Python. All machines of a run must share /runs: file sync writes there.
ENV PATH=/opt/rstar/bin:${PATH} \
    PYTHONPATH=/opt/lib \
    RSTAR_RUNTIME=/opt/runtime \
    RSTAR_TRAIN_ENGINES__VLLM_PYTHON=/usr/bin/python3 \
    HSA_NO_SCRATCH_RECLAIM=1 \
    NCCL_MIN_NCHANNELS=112
WORKDIR /runs
ENTRYPOINT ["rstar-train"]
CMD ["--help"]
