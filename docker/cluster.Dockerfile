# One of the other images with Ray, for the pods of a Ray cluster: docker build -f docker/cluster.Dockerfile \
#     --build-arg IMAGE=rstar-sandbox -t rstar-sandbox-cluster .
# For `rstar-train collect` IMAGE is rstar-train:cuda or rstar-train:rocm. It has not been built or run yet.
ARG IMAGE=rstar-sandbox
FROM ${IMAGE}
USER 0:0
COPY requirements/kuberay.txt /tmp/kuberay.txt
# Ray with its dashboard: KubeRay's health checks and `ray job submit` need it.
# If pip needs a configuration to reach an index, pass it as a secret (--secret id=pip,src=FILE): it stays out of the image.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --require-hashes \
        --requirement /tmp/kuberay.txt \
    && rm /tmp/kuberay.txt \
    && ray --version
# uid 10001 has no home; Ray writes to /tmp.
ENV HOME=/tmp \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /tmp
HEALTHCHECK NONE
# KubeRay and the manifests name their own commands.
ENTRYPOINT []
