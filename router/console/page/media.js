// Turns files and pictures of a camera into parts of a message, and shows them.

import { byId, element, sizeOf } from "./elements.js";

const ENDING_TO_KIND = {
  mp4: "video",
  mov: "video",
  webm: "video",
  mkv: "video",
  avi: "video",
  ts: "video",
  "3gp": "video",
  m4v: "video",
  wav: "audio",
  mp3: "audio",
  flac: "audio",
  ogg: "audio",
  opus: "audio",
  m4a: "audio",
  aac: "audio",
  png: "image",
  jpg: "image",
  jpeg: "image",
  webp: "image",
  gif: "image",
  bmp: "image",
  tif: "image",
  tiff: "image",
  avif: "image",
};

/** A `Medium` is a file that goes into a message. */
export class Medium {
  constructor(file, kind) {
    this.file = file;
    this.kind = kind;
    this.url = URL.createObjectURL(file);
  }

  get name() {
    return `${this.file.name || this.kind} (${sizeOf(this.file.size)})`;
  }

  /** Returns the part of a message that holds the medium. */
  async part() {
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new Error(`the file ${this.file.name} can't be read`));
      reader.readAsDataURL(this.file);
    });
    const type = `${this.kind}_url`;
    return { type, [type]: { url: url.replace(/^data:;/, "data:application/octet-stream;") } };
  }

  /** Returns an element that shows the medium. */
  shown() {
    if (this.kind === "image") return element("img", { src: this.url, alt: this.file.name || "picture" });
    const tag = this.kind === "video" ? "video" : "audio";
    return element(tag, { src: this.url, controls: true, "aria-label": this.file.name || this.kind });
  }
}

/** Returns what a file is, by its type or its ending, or null if it is no medium. */
export function kindOf(file) {
  const kind = file.type.split("/")[0];
  if (kind === "image" || kind === "video" || kind === "audio") return kind;
  return ENDING_TO_KIND[file.name.split(".").pop().toLowerCase()] ?? null;
}

/** Lets the person take a picture. `take` gets it as a file. */
export function openCamera(take) {
  const dialog = byId("camera-dialog");
  const view = byId("camera-view");
  const shown = byId("camera-error");
  let stream = null;
  let isClosed = false;
  const stop = () => stream?.getTracks().forEach((track) => track.stop());
  const close = () => {
    if (isClosed) return;
    isClosed = true;
    stop();
    view.srcObject = null;
    dialog.close();
  };
  shown.hidden = true;
  byId("camera-take").disabled = true;
  byId("camera-cancel").onclick = close;
  dialog.onclose = close; // A browser may close it itself, for the Escape key.
  byId("camera-take").onclick = () => {
    const canvas = element("canvas", { width: view.videoWidth, height: view.videoHeight });
    canvas.getContext("2d").drawImage(view, 0, 0);
    canvas.toBlob((blob) => take(new File([blob], "camera.jpg", { type: "image/jpeg" })), "image/jpeg", 0.92);
    close();
  };
  dialog.showModal();
  navigator.mediaDevices
    .getUserMedia({ video: { facingMode: "environment" } })
    .then(async (found) => {
      stream = found;
      if (isClosed) return stop(); // The dialog may be open again, for another camera.
      view.srcObject = found;
      await view.play();
      byId("camera-take").disabled = false;
    })
    .catch((error) => {
      if (isClosed) return;
      shown.textContent = `The camera can't be used: ${error.message}`;
      shown.hidden = false;
    });
}

/** Says whether the browser gives this page a camera: only pages over HTTPS and of this machine get one. */
export function hasCamera() {
  return Boolean(navigator.mediaDevices?.getUserMedia);
}
