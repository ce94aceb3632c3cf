"""Who may look: sign-in through OpenID Connect, where the server's secrets set it up.

Section `[auth]` of `.streamlit/secrets.toml` is Streamlit's own (docs.streamlit.io: "User authentication"). Beside it,
`[ampscope] users = ["ann@example.org", "*@example.com"]` names those who may come in; without it, everyone to whom the
provider gives an account. Without `[auth]` there is no sign-in, and `ampscope serve` listens on loopback alone or is
read-only.
"""

import streamlit as st

from amp_core.library.permissions import has_sign_in, user_allowed


def require() -> None:
    """Let the page go on for those who may see it; for others a button to sign in, or a sentence, and the end."""
    secrets = st.secrets.to_dict() if st.secrets.load_if_toml_exists() else {}
    if not has_sign_in(secrets):
        return
    if not st.user.is_logged_in:
        st.title("AMPscope", anchor=False)
        st.write("Sign in to see the runs of this server.")
        st.button("Sign in", icon=":material/login:", type="primary", on_click=st.login)
        st.stop()
    allowed = secrets.get("ampscope", {}).get("users")
    if not user_allowed(st.user.get("email"), st.user.get("email_verified"), allowed):
        st.error("This account may not see the runs of this server; ask its owner.", icon=":material/block:")
        st.button("Sign out", icon=":material/logout:", on_click=st.logout)
        st.stop()
    with st.sidebar:
        st.button("Sign out", icon=":material/logout:", type="tertiary", on_click=st.logout)
