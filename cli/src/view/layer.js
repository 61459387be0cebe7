// Rectangles of a canvas, in whole pixels of the device: drawn by WebGL2, or by the plain pen where there is none or
// where it is done without a GPU, which takes longer. `?2d` and `?webgl2` behind the page's address ask for one.
class Rectangles {
  constructor(id) {
    this.canvas = $(id);
    const asked = location.search;
    if (asked === '?webgl2' || asked !== '?2d' && Rectangles.hasGpu()) {
      this.gl = this.canvas.getContext('webgl2', { antialias: false, preserveDrawingBuffer: true });
    }
    if (this.gl) {
      this.prepare();
      // What the GPU forgets is made again.
      this.canvas.addEventListener('webglcontextlost', event => event.preventDefault());
      this.canvas.addEventListener('webglcontextrestored', () => { this.prepare(); draw(); drawMap(); });
    } else this.pen = this.canvas.getContext('2d');
    this.kind = this.gl ? 'webgl2' : '2d';
    this.colours = new Map();
  }

  // Not every browser says by the option that WebGL2 is done without a GPU; the renderer's name does.
  static hasGpu() {
    const gl = document.createElement('canvas').getContext('webgl2', { failIfMajorPerformanceCaveat: true });
    if (!gl) return false;
    const names = gl.getExtension('WEBGL_debug_renderer_info');
    const name = names ? gl.getParameter(names.UNMASKED_RENDERER_WEBGL) : '';
    gl.getExtension('WEBGL_lose_context')?.loseContext();
    return !/swiftshader|llvmpipe|softpipe|software|basic render/i.test(name);
  }

  prepare() {
    const gl = this.gl, program = gl.createProgram();
    const sources = [[gl.VERTEX_SHADER, `#version 300 es
      layout(location = 0) in vec4 box;
      layout(location = 1) in vec4 colour;
      uniform vec2 size;
      out vec4 filled;
      void main() {
        vec2 at = vec2((gl_VertexID & 1) == 0 ? box.x : box.z, (gl_VertexID & 2) == 0 ? box.y : box.w) / size;
        gl_Position = vec4(at.x * 2.0 - 1.0, 1.0 - at.y * 2.0, 0.0, 1.0);
        filled = colour;
      }`], [gl.FRAGMENT_SHADER, `#version 300 es
      precision mediump float;
      in vec4 filled;
      out vec4 shown;
      void main() { shown = filled; }`]];
    for (const [kind, source] of sources) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, source);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    gl.useProgram(program);
    this.size = gl.getUniformLocation(program, 'size');
    this.buffers = [[0, gl.FLOAT, false], [1, gl.UNSIGNED_BYTE, true]].map(([place, type, share]) => {
      const buffer = gl.createBuffer();
      gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
      gl.enableVertexAttribArray(place);
      gl.vertexAttribPointer(place, 4, type, share, 0, 0);
      gl.vertexAttribDivisor(place, 1);
      return buffer;
    });
  }

  begin() {
    const { canvas } = this, style = getComputedStyle(document.documentElement);
    this.scale = window.devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    this.height = canvas.clientHeight;
    canvas.width = Math.round(this.width * this.scale);
    canvas.height = Math.round(this.height * this.scale);
    this.ink = style.getPropertyValue('--ink').trim();
    this.rest = style.getPropertyValue('--rest').trim();
    this.boxes = [];
    this.paints = [];
    return this;
  }

  // Not narrower than a pixel, so that nothing vanishes.
  add(left, top, right, bottom, colour) {
    const place = amount => Math.round(amount * this.scale), x = place(left), y = place(top);
    this.boxes.push(x, y, Math.max(place(right), x + 1), Math.max(place(bottom), y + 1));
    this.paints.push(colour);
  }

  bytesOf(colour) {
    let made = this.colours.get(colour);
    if (!made) {
      const digits = colour.length === 4 ? [...colour.slice(1)].map(digit => digit + digit) : colour.slice(1).match(/../g);
      made = [...digits.map(digit => parseInt(digit, 16)), 255];
      this.colours.set(colour, made);
    }
    return made;
  }

  end() {
    const { boxes, paints, canvas, gl, pen } = this;
    if (!gl) {
      for (let n = 0; n < paints.length; n++) {
        const [x, y, right, bottom] = [boxes[4 * n], boxes[4 * n + 1], boxes[4 * n + 2], boxes[4 * n + 3]];
        pen.fillStyle = paints[n];
        pen.fillRect(x, y, right - x, bottom - y);
      }
      return;
    }
    const colours = new Uint8Array(4 * paints.length);
    paints.forEach((colour, n) => colours.set(this.bytesOf(colour), 4 * n));
    gl.viewport(0, 0, canvas.width, canvas.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.uniform2f(this.size, canvas.width, canvas.height);
    [new Float32Array(boxes), colours].forEach((content, n) => {
      gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[n]);
      gl.bufferData(gl.ARRAY_BUFFER, content, gl.STREAM_DRAW);
    });
    gl.drawArraysInstanced(gl.TRIANGLE_STRIP, 0, 4, paints.length);
  }

  // The picture's pixels, from the top on.
  pixels() {
    const { canvas: { width, height }, gl, pen } = this;
    if (!gl) return new Uint8Array(pen.getImageData(0, 0, width, height).data);
    const turned = new Uint8Array(4 * width * height), line = 4 * width, made = new Uint8Array(4 * width * height);
    gl.readPixels(0, 0, width, height, gl.RGBA, gl.UNSIGNED_BYTE, turned);
    for (let y = 0; y < height; y++) made.set(turned.subarray((height - 1 - y) * line, (height - y) * line), y * line);
    return made;
  }
}
