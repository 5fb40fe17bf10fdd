# The server in an image: docker build -f docker/sandbox.Dockerfile -t rstar-sandbox .
# BASE is any image with a glibc and Python 3.11 or later as python3, with venv.
ARG BASE=docker.io/library/python:3.13-slim

FROM ${BASE} AS build
COPY pyproject.toml README.md LICENSE /src/
COPY requirements /src/requirements
COPY sandbox /src/sandbox
COPY trainer /src/trainer
# If pip needs a configuration to reach an index, pass it as a secret (--secret id=pip,src=FILE): it stays out of the image.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/rstar-sandbox \
    && /opt/rstar-sandbox/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        --requirement /src/requirements/runtime.txt \
    && /opt/rstar-sandbox/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /src \
    && /opt/rstar-sandbox/bin/rstar-sandbox runtime --path /opt/runtime

FROM ${BASE}
COPY --from=build /opt /opt
ENV PATH=/opt/rstar-sandbox/bin:/usr/local/bin:/usr/bin:/bin \
    RSTAR_RUNTIME=/opt/runtime \
    RSTAR_SANDBOX_PORT=8642
USER 10001:10001
WORKDIR /tmp
EXPOSE 8642
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os; from urllib.request import urlopen; urlopen(f\"http://127.0.0.1:{os.environ['RSTAR_SANDBOX_PORT']}/health\", timeout=4)"]
# A token is required, as a variable or a file: RSTAR_SANDBOX_TOKEN or RSTAR_SANDBOX_TOKEN_FILE.
ENTRYPOINT ["rstar-sandbox", "serve", "--host", "0.0.0.0"]
