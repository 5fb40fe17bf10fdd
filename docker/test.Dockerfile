# The server's image with its tests: see docker/test.
ARG IMAGE
FROM ${IMAGE}
USER 0:0
COPY pyproject.toml README.md LICENSE /src/
COPY requirements /src/requirements
COPY sandbox /src/sandbox
COPY trainer /src/trainer
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/rstar-sandbox/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        --requirement /src/requirements/test.txt \
    && /opt/rstar-sandbox/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --editable /src
COPY docker /src/docker
COPY bench /src/bench
COPY examples /src/examples
COPY tests /src/tests
WORKDIR /src
USER 10001:10001
ENTRYPOINT ["python", "-m", "pytest", "-p", "no:cacheprovider"]
