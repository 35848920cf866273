// Runs the engine of Perfetto's web page in Node: its worker's script and its WebAssembly.
//
//     node perfetto_engine.js FOLDER
//
// FOLDER holds engine_bundle.js and its .wasm. Standard input and output carry the worker's
// messages, each behind its length in four bytes, the least significant first.
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const port = {
  onmessage: null,
  postMessage(bytes) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(bytes.length);
    fs.writeSync(1, length);
    for (let at = 0; at < bytes.length; ) at += fs.writeSync(1, bytes, at);
  },
};

// The engine asks for its .wasm, and waits for it.
class FolderRequest {
  open(method, url) {
    this.file = path.join(folder, path.basename(url));
  }
  send() {
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
  }
}

// What a worker finds in a browser; no `process`, or the script would take itself for a Node one.
const worker = {
  location: { href: "https://engine.invalid/engine_bundle.js" },
  console: { log: console.error, warn: console.error, error: console.error },
  URL, TextDecoder, TextEncoder, performance, setTimeout, clearTimeout, queueMicrotask, crypto,
  WorkerGlobalScope: function WorkerGlobalScope() {},
  XMLHttpRequest: FolderRequest,
};
worker.self = worker;
const context = vm.createContext(worker);
// Inside, `Uint8Array` is another one: messages are made of the worker's own.
const OwnBytes = vm.runInContext("Uint8Array", context);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), context);
worker.onmessage({ data: port });

let buffered = Buffer.alloc(0);
process.stdin.on("data", (chunk) => {
  buffered = Buffer.concat([buffered, chunk]);
  while (buffered.length >= 4 && buffered.length >= 4 + buffered.readUInt32LE(0)) {
    const end = 4 + buffered.readUInt32LE(0);
    const message = OwnBytes.from(buffered.subarray(4, end));
    buffered = buffered.subarray(end);
    port.onmessage({ data: message });
  }
});
