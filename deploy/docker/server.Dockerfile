# A server on Linux processors, kernels included.  docker build -f deploy/docker/server.Dockerfile -t phalanx-server .
# Debian 12: what a newer C library compiles does not pass as a wheel for manylinux_2_35.
FROM python:3.12-slim-bookworm AS wheels
RUN apt-get update && apt-get install -y --no-install-recommends g++ make
COPY . /src
RUN make -C /src wheels DIST=/wheels PYTHONS=python

FROM python:3.12-slim-bookworm
COPY --from=wheels /wheels /wheels
# By its file: an index may have a newer package of this name.
RUN python -m pip install --no-cache-dir --find-links /wheels "phalanx[cpu,mpi] @ file://$(echo /wheels/phalanx-[0-9]*.whl)"
RUN mkdir /models && chown 65534:65534 /models
USER 65534:65534
# Models that are pulled; HOME is for Open MPI.
ENV HOME=/models HF_HOME=/models/hub XDG_CACHE_HOME=/models
VOLUME /models
EXPOSE 8000
# /health answers 200 once the model is loaded, and 503 while the ranks start again.
HEALTHCHECK --start-period=30m CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["phalanx"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
