"""Servers on this machine, in the place of those that our downloads come from."""

import contextlib
import http.server
import threading


@contextlib.contextmanager
def serving(handler):
    """The address of a server that answers as a handler of requests says."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def use_hub(monkeypatch, endpoint, cache):
    """Take an address for that of Hugging Face's hub; None for a hub that is out of reach."""
    constants = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_CACHE": str(cache),
        # An earlier test may have found that there is no hub.
        "HF_HUB_OFFLINE": endpoint is None,
    }
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
