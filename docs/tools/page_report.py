"""Draw docs/pictures/report.png, a report's page with notes beside it, and timeline.png of its run.

python docs/tools/page_report.py runs/quickstart/report      # needs chromium
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
_WIDTH_PX, _HEIGHT_PX = 1040, 1125
#: A note, and where its number is: a selector, with a part of the width and height of what it
#: finds, or a timeline, with ms and a stage.
NOTES = (
    ("What was saved, with its interval, and how it was metered.", [".tiles div", 0.93, 0.25]),
    ("What that cost in time.", [".tiles div:nth-child(2)", 0.95, 0.25]),
    ("At full clock, GPUs wait for each other (hatched).", ["before", 210, 1]),
    ("The critical path sets the time of an iteration.", ["before", 913, 2.6]),
    ("EnvPipe's order fills waits: more forwards first, then I, for which the stage before waits, "
     "and W.", ["after", 525, 0.55]),
    ("Colour is the clock: lower where there is time.", ["after", 935, 0.55]),
    ("The time is the same.", ["after", 1080, 3.6]),
)  # fmt: skip
_SCRIPT = """
const [notes, width] = %s;
document.body.style.cssText += `margin: 0; max-width: ${width}px`;
document.querySelector("nav").style.display = "none";
const badge = (number, style) => `<b style="display: inline-block; width: 21px; height: 21px;
  border-radius: 11px; background: #b00d59; color: white; font: bold 13px/21px system-ui;
  text-align: center; flex: none; ${style}">${number}</b>`;
const draw = () => {
  let list = "", badges = "", bottom = 0;
  for (const [at, [text, [what, x, y]]] of notes.entries()) {
    const model = Bokeh.documents[0].get_model_by_name(what);
    const view = model && Bokeh.index.find_one_by_id(model.id);
    const box = (view ? view.el : document.querySelector(what)).getBoundingClientRect();
    const left = box.left + (view ? view.frame.x_scale.compute(x) : x * box.width) - 10;
    const top = box.top + (view ? view.frame.y_scale.compute(y) : y * box.height) - 10;
    badges += badge(at + 1, `position: absolute; left: ${left}px; top: ${top}px; z-index: 9`);
    list += `<div style="display: flex; gap: 8px">${badge(at + 1, "")}<span>${text}</span></div>`;
    bottom = Math.max(bottom, box.bottom);
  }
  document.body.insertAdjacentHTML("beforeend", `${badges}<div style="position: absolute; left: 0;
    top: ${bottom}px; width: ${width}px; height: 2000px; background: #fff4f8; padding: 12px 15px;
    z-index: 8; display: grid; grid-template-columns: 1fr 1fr; gap: 6px 24px;
    align-content: start; border-top: 2px solid #b00d59">${list}</div>`);
};
const wait = () => setTimeout(document.documentElement.dataset.ready ? draw : wait, 500);
wait();
"""


def main(report: Path) -> None:
    """Write both pictures, in few colours, so that they are small."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("page_report.py needs chromium")
    script = _SCRIPT % json.dumps([NOTES, _WIDTH_PX])
    page = (report / "index.html").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        noted, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        noted.write_text(page.replace("</html>", f"<script>{script}</script></html>"))
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000"]
        options += [f"--window-size={_WIDTH_PX},{_HEIGHT_PX}", f"--screenshot={shot}"]
        subprocess.run([browser, *options, noted.as_uri()], check=True)
        save_small(shot, PICTURES / "report.png")
    save_small(report / "timeline.png", PICTURES / "timeline.png")


def save_small(picture: Path, path: Path) -> None:
    """Write a picture with a palette of 256 colours."""
    with Image.open(picture) as read:
        read.convert("RGB").quantize(colors=256).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
