"""The form of the page *Start a run* under AppTest.

app = submit(open_app(START))
"""

START = "pages/start_run.py"


def field(app, name):
    """The form's field of that key."""
    for kind in ("number_input", "selectbox", "toggle", "text_input", "button_group"):
        for element in app.get(kind):
            if element.key == f"start.{name}":
                return element
    raise LookupError(name)


def submit(app):
    return next(b for b in app.button if b.key == "start.go").click().run()
