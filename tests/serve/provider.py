"""An OpenID Connect provider on the loopback address, and a client that signs in like a browser: `with provider() as p:
…`.

It implements what a sign-in needs: discovery, the authorization code flow with PKCE, tokens signed with RS256, keys.
"""

import base64
import contextlib
import hashlib
import http.cookiejar
import json
import secrets
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT = "ampscope-test"


def _key() -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": "of-the-test", "use": "sig", "alg": "RS256"})


@dataclass
class Provider:
    """The next account to sign in, and whether the provider behaves correctly."""

    base: str = ""
    account: dict[str, Any] = field(default_factory=dict)
    """Claims on the account that signs in."""
    forged: bool = False
    """Sign with a key that is not among those that it shows."""
    key: RSAKey = field(default_factory=_key)
    requested: dict[str, dict[str, str]] = field(default_factory=dict)
    """What came with each authorization request, by the code that it was given."""

    def discovery(self) -> dict[str, Any]:
        return {
            "issuer": self.base,
            "authorization_endpoint": f"{self.base}/authorize",
            "token_endpoint": f"{self.base}/token",
            "jwks_uri": f"{self.base}/keys",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
        }

    def authorize(self, query: dict[str, str]) -> str:
        """The redirect with the code; the account need not fill in a form."""
        code = secrets.token_urlsafe(16)
        self.requested[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def token(self, form: dict[str, str]) -> dict[str, Any] | None:
        """The tokens for a code, once; None if the code or its verifier is wrong."""
        requested = self.requested.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        if (
            requested is None
            or requested.get("code_challenge") != base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        ):
            return None
        now = int(time.time())
        claims = {
            "iss": self.base,
            "aud": CLIENT,
            "sub": "1",
            "iat": now,
            "exp": now + 300,
            "nonce": requested["nonce"],
        }
        key = _key() if self.forged else self.key
        signed = jwt.encode({"alg": "RS256", "kid": "of-the-test"}, claims | self.account, key)
        return {
            "access_token": secrets.token_urlsafe(16),
            "token_type": "Bearer",
            "expires_in": 300,
            "id_token": signed,
        }


@contextlib.contextmanager
def provider() -> Iterator[Provider]:
    """A provider that runs until the end of the context."""
    result = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            at = urlsplit(self.path)
            if at.path == "/authorize":
                self.send_response(302)
                self.send_header("Location", result.authorize(dict(parse_qsl(at.query))))
                self.end_headers()
            elif at.path == "/keys":
                self.answer({"keys": [result.key.as_dict(private=False)]})
            else:
                self.answer(result.discovery())

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            tokens = result.token({name: values[0] for name, values in form.items()})
            self.answer(tokens or {"error": "invalid_grant"}, 200 if tokens else 400)

        def answer(self, record: dict[str, Any], status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(record).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    result.base = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield result
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def cookies_after(*urls: str) -> str:
    """Follow each address and its redirects, as a browser does; returns the cookies as a header."""
    jar = http.cookiejar.CookieJar()
    browser = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(jar))
    for url in urls:
        with browser.open(url, timeout=300):
            pass
    return "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)
