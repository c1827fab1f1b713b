# docker build --tag coupled-adam .
# docker run --rm --gpus all --volume "$PWD:/work" coupled-adam compare --recipe tiny --out runs/tiny
FROM python:3.12-slim

# gcc compiles the kernel for CPUs when the package is installed, and Triton's launchers at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# torch first and alone: with another index this is a build for other hardware.
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0

COPY . /opt/coupled-adam
RUN pip install --no-cache-dir --constraint /opt/coupled-adam/constraints.txt '/opt/coupled-adam[lab]'

WORKDIR /work
ENTRYPOINT ["coupled-adam"]
CMD ["--help"]
