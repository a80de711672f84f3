# An image with the commands: docker build --tag slipstream . && docker run --rm --volume "$PWD:/work" slipstream plan job.toml
FROM python:3.11-slim

# Where numba keeps machine code: any user of the image may read and add to it.
ENV NUMBA_CACHE_DIR=/var/cache/numba
RUN mkdir --mode=1777 /var/cache/numba

COPY . /opt/slipstream
RUN pip install --no-cache-dir torch==2.13.0 \
    && pip install --no-cache-dir /opt/slipstream \
    && python -m slipstream.planner.compiled \
    && python -m slipstream.schedules.dealing.compiled \
    && chmod --recursive a+rwX /var/cache/numba

WORKDIR /work
ENTRYPOINT ["slipstream"]
