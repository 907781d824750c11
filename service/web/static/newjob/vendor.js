// Written by deploy/editor/build.mjs: where the bundle of other people's packages is.

export * from "../vendor/editor-5050f0783b0e/editor.js";
